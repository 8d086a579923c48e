"""Private names of torch under public ones: imports, operators, and accessors for attributes.

What torch itself imports is re-exported at once. DTensor, FSDP, checkpoints, pipelines and the compiler take seconds to
import: their names are imported when they are first asked for. Of private names these alone are used elsewhere too,
because every version of torch and half of its users rely on them: `_parameters`, `_buffers`, `_modules` and `_apply` of
nn.Module.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore as HashStore  # a store for a group of one process, without a port
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # rehearsals compute on these
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily  # real values within one
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # sees every operator
from torch.utils._pytree import keystr as keystr  # nested arguments and outputs of modules
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

if TYPE_CHECKING:
    from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir as default_cache_dir
    from torch.distributed._composable import checkpoint as checkpoint  # type: ignore[attr-defined]
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict as flatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
    from torch.distributed.checkpoint.utils import _DistWrapper
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.pipelining._backward import stage_backward_input as stage_backward_input
    from torch.distributed.pipelining._backward import stage_backward_weight as stage_backward_weight
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
    from torch.distributed.tensor._utils import (
        compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore
    from torch.utils._triton import has_triton as has_triton

    DistWrapper = _DistWrapper
    StorageInfo = _StorageInfo

functorch_config: Any = torch._functorch.config  # what the compiler recomputes in backward
resolve_process_group = _resolve_process_group  # a group by its name, which operators are given
ConvNd = _ConvNd  # convolutions of any number of dimensions

TORCH = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])

_FSDP = "torch.distributed.fsdp._fully_shard"
LAZY = {  # by public name: the module and the name in it
    # bases of collectives that FSDP calls in the place of its own
    "AllGather": (f"{_FSDP}._fsdp_api", "AllGather"),
    "ReduceScatter": (f"{_FSDP}._fsdp_api", "ReduceScatter"),
    # a DTensor from a local tensor of another device, or from one without memory
    "DTensorSpec": ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
    "TensorMeta": ("torch.distributed.tensor._dtensor_spec", "TensorMeta"),
    # where a rank's part begins
    "compute_local_shape_and_global_offset": (
        "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset",
    ),
    # recomputation of a block that FSDP may shard
    "checkpoint": ("torch.distributed._composable", "checkpoint"),
    # a backward in two parts, for zero-bubble schedules
    "stage_backward_input": ("torch.distributed.pipelining._backward", "stage_backward_input"),
    "stage_backward_weight": ("torch.distributed.pipelining._backward", "stage_backward_weight"),
    # what distributed checkpoints are written with
    "flatten_state_dict": ("torch.distributed.checkpoint._nested_dict", "flatten_state_dict"),
    "DistWrapper": ("torch.distributed.checkpoint.utils", "_DistWrapper"),
    "StorageInfo": ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    # groups of any size in one process, whose collectives return at once
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    # what the compiler raises of itself, where it keeps what it compiled, and whether it can
    "TorchDynamoException": ("torch._dynamo.exc", "TorchDynamoException"),
    "default_cache_dir": ("torch._inductor.runtime.cache_dir_utils", "default_cache_dir"),
    "has_triton": ("torch.utils._triton", "has_triton"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, private = LAZY[name]
    value = globals()[name] = getattr(import_module(module), private)
    return value


# Collectives that the compiler knows: a group is given by its name.


def all_gather_flat(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Concatenates the tensors of a group's ranks along the first dim."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, group))  # type: ignore[no-any-return]


def reduce_scatter_flat(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """This rank's part, along the first dim, of the sum over a group's ranks."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", size, group))  # type: ignore[no-any-return]


def all_reduce_flat(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over a group's ranks."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, "sum", group))  # type: ignore[no-any-return]


# Operators.

foreach_add_ = torch._foreach_add_  # many tensors in one call: the arithmetic of the optimizers
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign_ = torch._foreach_sign_
fused_adamw_ = torch._fused_adamw_  # the operator behind AdamW(fused=True)
scaled_mm = torch._scaled_mm  # products in fp8
safe_softmax = torch.ops.aten._safe_softmax  # attention in steps, as a rehearsed GPU does it
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention  # attention that also gives its log-sum-exp
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def schema_of(operator: Any) -> Any:
    """The schema of an operator as a dispatch mode gets it: its name and its arguments."""
    return operator._schema


# Tensors and autograd.


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for all tensors that share a storage, while it lives; also of fake ones, which have no address."""
    key: int = storage._cdata
    return key


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return tensor._is_view()


def has_accumulate_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks take the gradient of a parameter as soon as it is there."""
    return bool(parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Whether this thread is within a backward: also of a forward that is recomputed there."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls back when the backward that is under way has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def without_torch_function() -> Any:
    """A context in which functions of torch are not handed to modes and subclasses."""
    return torch._C.DisableTorchFunction()


class OpenGradScaler(torch.amp.GradScaler):
    """GradScaler whose scale and counters a subclass may read and set."""

    def start(self, device: torch.device) -> None:
        """Makes scale and counter, which torch does with the first loss."""
        self._lazy_init_scale_growth_tracker(device)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """On this rank's parts, by device: no operator takes DTensors of several meshes at once."""
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found = {found_inf.device: found_inf}
        for (device, _), gradients in alike.items():
            flag = found.setdefault(device, found_inf.to(device))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inv_scale.to(device))
        return found

    def overflows_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """After `unscale_`: for each device 1 where a gradient was not finite, else 0."""
        return list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())

    def take_overflows(self) -> list[torch.Tensor]:
        """Those of all optimizers, which are ready for the next step from then on."""
        states = self._per_optimizer_states.values()
        overflows = [inf for state in states for inf in state["found_inf_per_device"].values()]
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        return overflows

    def scale_and_growth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale, and how many steps went well since it last changed; both on the device."""
        return self._check_scale_growth_tracker("update")

    def growth(self) -> int:
        """How many steps went well since the scale last changed."""
        return self._get_growth_tracker()

    def set_scale(self, scale: float, growth: int) -> torch.device:
        """Goes on from a saved scale; returns where it lies."""
        self._init_scale, self._init_growth_tracker = scale, growth
        if self._scale is None:
            return torch.device(self._device)
        self._scale.fill_(scale)
        assert self._growth_tracker is not None
        self._growth_tracker.fill_(growth)
        return self._scale.device


# DTensor.


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part itself: `to_local` gives a view that autograd knows."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Puts another part in place, e.g. one without memory."""
    tensor._local_tensor = local


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements, and shape of the full tensor."""
    return tensor._spec


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Within it plain tensors beside DTensors count as replicated; unlike torch's own, it may be entered again."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def set_dtensor_handler(operator: Any, handler: Callable[[Any, Any, Any], Any]) -> None:
    """Has DTensor call `handler(operator, args, kwargs)` in the place of a rule for an operator."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._custom_op_handlers[operator] = handler


# FSDP. A state belongs to modules that are sharded together; its groups are what is gathered together.


def fsdp_state(unit: FSDPModule) -> Any:
    """FSDP's record of a unit, the same for all modules of it."""
    return unit._get_fsdp_state()


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """FSDP's own records of what is gathered with this unit; before torch 2.12 there is one at most."""
    state: Any = unit._get_fsdp_state()
    if TORCH >= (2, 12):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def gather_streams(state: Any) -> list[Any]:
    """The streams on which the parameters of a state are gathered; none before its first forward, which makes them."""
    context = state._comm_ctx
    return [] if state._is_root is None else [context.all_gather_copy_in_stream, context.all_gather_stream]


def set_async_gather(unit: FSDPModule, on: bool) -> None:
    """Whether gathers of a unit are asynchronous operations."""
    unit._set_unshard_async_op(on)


def finish_backward(root: FSDPModule) -> None:
    """What FSDP does when the backward of its root ends: waits for reductions, and gets ready for the next forward."""
    fsdp_state(root)._root_post_backward_final_callback()


def all_gather_of(group: Any) -> AllGather:
    """What a group is gathered with."""
    return group._all_gather_comm  # type: ignore[no-any-return]


def reduce_scatter_of(group: Any) -> ReduceScatter:
    """What a group's gradients are reduced with."""
    return group._reduce_scatter_comm  # type: ignore[no-any-return]


def is_hybrid(group: Any) -> bool:
    """Whether a group's gradients are all-reduced across replicas."""
    return bool(group._is_hsdp)


def all_reduce_group(group: Any) -> torch.distributed.ProcessGroup:
    """The replicas of a group; of a hybrid one only."""
    return group._all_reduce_process_group  # type: ignore[no-any-return]


def all_reduce_hook(group: Any) -> Callable[[torch.Tensor], None] | None:
    """What is called right after a group's all-reduce, on the same stream."""
    return group._all_reduce_hook  # type: ignore[no-any-return]


def gradient_dtype(group: Any) -> torch.dtype | None:
    """The dtype of the sharded parameters that a group trains, and so of their gradients; once it was used."""
    return group._orig_dtype  # type: ignore[no-any-return]


def partial_reduction(group: Any) -> torch.Tensor | None:
    """Gradients that are reduced within the shards and not yet across replicas."""
    return group._partial_reduce_output  # type: ignore[no-any-return]


def unsharded_parameter(parameter: Any) -> nn.Parameter | None:
    """The full parameter; None before FSDP gathered it for the first time, also while it is freed."""
    return parameter._unsharded_param if "_unsharded_param" in vars(parameter) else None


def owners_of(parameter: Any) -> Any:
    """The modules that have a parameter, and its name in each."""
    return parameter._module_info


def replace_shard(parameter: Any, shard: torch.Tensor, padded: torch.Tensor) -> None:
    """Puts a tensor with FSDP's extensions in the place of a shard; `padded` is the same, flat, with its padding."""
    set_local_tensor(parameter.sharded_param, shard)
    parameter._sharded_param_data = padded
    parameter._init_extensions()


def fsdp_module_name(owner: Any) -> str:
    """The name of the module that FSDP is at, of an object whose method runs; empty for any other object."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return (owner._module_fqn or "") if isinstance(owner, FSDPParamGroup) else ""


def is_recomputed(module: nn.Module) -> bool:
    """Whether a module is under `checkpoint`."""
    from torch.distributed._composable.contract import _get_registry

    return "checkpoint" in (_get_registry(module) or {})


@cache
def leave_integers_alone() -> None:
    """Teaches FSDP2 of torch 2.11 that parameters of integers have no gradient and are gathered as they are."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    module: Any = _fsdp_param
    plain: Any = module.FSDPParam.init_dtype_attrs

    def init_dtype_attrs(self: Any, policy: Any) -> None:
        plain(self, policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    def parameter(data: torch.Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(data, data.is_floating_point() if requires_grad is None else requires_grad)

    module.FSDPParam.init_dtype_attrs = init_dtype_attrs
    module.nn = SimpleNamespace(**vars(nn) | {"Parameter": parameter})


# Process groups, checkpoints, memory.


def default_store() -> Any:
    """The store that the ranks of the default group met in."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def process_groups() -> list[torch.distributed.ProcessGroup]:
    """Every group that this process is in."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def is_group_object(argument: Any) -> bool:
    """Whether an argument of an operator is a process group, in the form that operators take."""
    return isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())  # type: ignore[attr-defined]


def flight_recording(only_active: bool) -> list[dict[str, Any]]:
    """The flight recorders' entries, without stacks; NCCL's are in a recorder of its own."""
    from torch._C import _distributed_c10d

    dumps = [_distributed_c10d._dump_fr_trace_json]  # type: ignore[attr-defined]
    if dist.is_nccl_available():
        dumps.append(_distributed_c10d._dump_nccl_trace_json)  # type: ignore[attr-defined]
    entries: list[dict[str, Any]] = []
    for dump in dumps:
        entries += json.loads(dump(True, only_active)).get("entries", ())
    return entries


def index_path(reader: FileSystemReader, rank: int | None) -> Any:
    """Where a distributed checkpoint has its index: of all ranks, or one rank's own."""
    return reader._get_metadata_path(rank)


def record_memory_history(entries: int | None) -> None:
    """From now on notes so many allocations on the GPU; with None, no more."""
    if entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=entries)


def dump_memory_snapshot(file: str) -> None:
    """Writes what was noted, for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(file)
