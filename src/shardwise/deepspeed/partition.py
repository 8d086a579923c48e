"""`zero.Init` and `zero.GatheredParameters`: parameters that are sharded at construction, and temporarily gathered.

[Note: born divided] Inside `Init` every parameter is replaced, as a module registers it, by a DTensor of which each
rank keeps its rows; PyTorch publishes that hook (`register_module_parameter_registration_hook`). In-place changes by
the model's code (`nn.init.*`, `weight[0].zero_()`, `weight.data.normal_()`) are made by every rank on a full plain
copy, which is sharded again, so the random stream and the values are those of the same code without `Init`; the copy of
rank 0 counts, as in DeepSpeed. A rank holds its rows plus one full parameter at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from shardwise.core.compat.torch_private import tree_leaves, tree_map, without_torch_function
from shardwise.deepspeed.refused import refuse
from shardwise.nn.models.weights import fill_local

_NOT_VALUES = ("requires_grad_", "detach_", "share_memory_", "retain_grad", "rename_")  # in place, but not on values


class ZeroParamStatus(Enum):
    """Whether a parameter is gathered on this rank, as DeepSpeed counts it."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init:
    """Context in which modules are built without a full replica on any rank; `initialize` takes them over.

    `dtype` has no effect: master weights are fp32 and the config's precision decides the compute dtype.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        unsupported = {"data_parallel_group": data_parallel_group, "mpu": mpu, "param_swapper": param_swapper,
                 "zero_param_parallel_group": zero_param_parallel_group,
                 "sequence_data_parallel_group": sequence_data_parallel_group}  # fmt: skip
        for name, value in unsupported.items():
            if value is not None:
                raise refuse(f"zero.Init({name}=…)", "parameters are divided over all ranks")
        self.enabled = enabled
        self._mode: _Sharding | None = None
        if enabled and module is not None:
            _Sharding().shard_modules([module])

    def __enter__(self) -> Init:
        if self.enabled:
            self._mode = _Sharding()
            self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)
            if error is None:
                self._mode.shard_modules(list(self._mode.modules))  # e.g. weights that were read from a file
            self._mode = None


class GatheredParameters:
    """Context in which the given parameters are gathered; with `modifier_rank`, that rank's changes are kept."""

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        several = isinstance(params, Iterable) and not isinstance(params, torch.Tensor)
        self.enabled, self.modifier_rank = enabled, modifier_rank
        self._parameters = [p for p in (params if several else [params]) if isinstance(p, DTensor)] if enabled else []
        self._mode: _Redirecting | None = None

    @torch.no_grad()
    def __enter__(self) -> None:
        self._mode = _Redirecting({id(p): nn.Parameter(full_tensor(p), p.requires_grad) for p in self._parameters})
        self._mode.__enter__()

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._mode is not None
        self._mode.__exit__(kind, error, trace)
        if self.modifier_rank is None or error is not None:
            return
        for parameter in self._parameters:
            keep_rows(parameter, self._mode.full[id(parameter)].detach(), self.modifier_rank)


@torch.no_grad()
def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A full plain copy of a tensor, on every rank; collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    full: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full.clone() if full.data_ptr() == tensor.to_local().data_ptr() else full


@torch.no_grad()
def keep_rows(target: torch.Tensor, values: torch.Tensor, source: int | None = None) -> None:
    """Writes this rank's shard of a full tensor; with `source`, the values of that rank."""
    if source is not None and dist.get_world_size() > 1:
        device = target.device  # which is where the ranks have a way to talk
        values = values.to(device, target.dtype).contiguous()
        dist.broadcast(values.reshape(-1).view(torch.uint8), source)
    fill_local(target.detach(), values.reshape(target.shape))


def release(model: nn.Module) -> tuple[dict[int, nn.Parameter], Callable[[nn.Module], None] | None]:
    """Replaces parameters sharded by `Init` by `meta` ones; returns these by the id of the old, and the filler.

    The filler writes the values into the model once it is sharded; it is None if nothing was sharded.
    """
    originals: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    if not originals:
        return {}, None
    new = {id(p): _on_meta(p) for p in originals.values()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in new:
                module._parameters[name] = new[id(parameter)]
            elif not parameter.is_meta:  # divided later, by the sharding itself, from what the filler writes
                originals |= {n: p for n, p in model.named_parameters() if p is parameter}
                new[id(parameter)] = _on_meta(parameter)
                module._parameters[name] = new[id(parameter)]

    def fill(sharded: nn.Module) -> None:
        targets = dict(sharded.named_parameters())
        for name in list(originals):
            parameter = originals.pop(name)  # freed one by one, as the shards take over
            value = full_tensor(parameter).to(targets[name].device)
            keep_rows(targets[name], value, None if isinstance(parameter, DTensor) else 0)

    return new, fill


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)


class _Sharding(TorchFunctionMode):
    """Shards parameters as they are registered; see [Note: born divided]."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._mesh = _all_ranks()
        self._divided: dict[int, tuple[weakref.ref[torch.Tensor], nn.Parameter]] = {}
        self._hook: Any = None

    def __enter__(self) -> Any:
        self._hook = register_module_parameter_registration_hook(self._register)  # type: ignore[arg-type]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)

    def shard_modules(self, modules: list[nn.Module]) -> None:
        """Shards the remaining full parameters of existing modules."""
        for module in (inner for outer in modules for inner in outer.modules()):
            for name, parameter in list(module._parameters.items()):
                module._parameters[name] = self._register(module, name, parameter) or parameter

    def _register(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        self.modules.add(module)
        if parameter is None or parameter.is_meta or isinstance(parameter, DTensor):
            return None
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return None
        known = self._divided.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]  # registered twice: tied weights stay tied
        with torch.no_grad(), without_torch_function():
            divided = nn.Parameter(_shard(parameter.detach(), self._mesh), parameter.requires_grad)
        vars(divided).update(vars(parameter))
        self._divided[id(parameter)] = (weakref.ref(parameter), divided)
        return divided

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        name = getattr(func, "__name__", "")
        if isinstance(kwargs.get("out"), torch.Tensor):
            return self._change(func, kwargs["out"], args, kwargs)
        if name == "__getitem__" and isinstance(target, DTensor):
            copy = full_tensor(target)
            return _tagged(func(copy, *args[1:]), target, copy)
        changes = (name.endswith("_") and not name.endswith("__") and name not in _NOT_VALUES) or name == "__setitem__"
        if changes and isinstance(target, torch.Tensor):
            return self._change(func, target, args, kwargs)
        if func == torch.Tensor.data.__set__ and isinstance(target, DTensor) and not isinstance(args[1], DTensor):  # type: ignore[attr-defined]
            keep_rows(target, args[1], 0)
            return None
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if len({isinstance(t, DTensor) for t in tensors}) == 2:
            args, kwargs = tree_map(lambda t: full_tensor(t) if isinstance(t, DTensor) else t, (args, kwargs))
        return func(*args, **kwargs)

    def _change(self, func: Any, target: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """Runs a function that changes its first argument on full tensors, and keeps this rank's rows."""
        copies = {id(t): full_tensor(t) for t in tree_leaves((args, kwargs)) if isinstance(t, DTensor)}
        args, kwargs = tree_map(lambda t: copies.get(id(t), t), (args, kwargs))
        result = func(*args, **kwargs)
        if isinstance(target, DTensor):
            keep_rows(target, copies[id(target)], 0)
            return target
        source = getattr(target, "_part_of", None)
        known = self._divided.get(id(target))
        if source is not None:
            keep_rows(source[0], source[1], 0)
        elif known is not None and known[0]() is target:
            keep_rows(known[1], target.detach(), 0)  # the code kept a name for the plain tensor it registered
        return result


class _Redirecting(TorchFunctionMode):
    """Lets every function that is given a sharded parameter use its full copy instead."""

    def __init__(self, full: dict[int, nn.Parameter]) -> None:
        super().__init__()
        self.full = full

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda t: self.full.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)


def _tagged(view: torch.Tensor, source: DTensor, copy: torch.Tensor) -> torch.Tensor:
    """Records the parameter of a view, so that a change to the view reaches the parameter."""
    view._part_of = (source, copy)  # type: ignore[attr-defined]
    return view


def _shard(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor, mesh, [Shard(0)] if tensor.ndim else [Replicate()], src_data_rank=0)


def _all_ranks() -> DeviceMesh:
    from shardwise.deepspeed.comm import init_distributed

    if not dist.is_initialized():
        init_distributed()
    if "gloo" not in str(dist.get_backend_config()):
        raise refuse("zero.Init in a process group without gloo", "join with deepspeed.init_distributed()")
    return init_device_mesh("cpu", (dist.get_world_size(),))
