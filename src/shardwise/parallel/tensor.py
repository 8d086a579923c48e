"""Tensor and sequence parallelism for any model: every parameter a DTensor, every tensor between layers too.

The model's own code runs unchanged: it sees whole shapes (`view(batch, width, heads, -1)` means what it says) while each
rank holds and computes its part. Between the sub-layers of a block the hidden states lie cut along the sequence; a layer
cut by its outputs (column) takes them gathered, a layer cut by its inputs (row) leaves sums that are scattered along the
sequence again: Megatron's two gathers and two scatters a block and direction.

[Note: plain inside] A cut layer, a stack of experts, and whatever DTensor cannot compute (`Roles.plain`) run on plain
tensors: the layer's inputs and parameters are exchanged for this rank's part of them, the layer's own forward is called
(of any class: with an adapter, or with a weight in few bits), and what it made is a DTensor again. Whatever is whole on
every rank there but multiplied with a part has a gradient that is a part of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map

from shardwise.adapters.layers import AdapterLayer, LoraLayer, is_linear, is_transposed
from shardwise.models.build import find_blocks
from shardwise.parallel.local import local_parameters, to_local, to_whole, wrap
from shardwise.parallel.packed import can_slice, is_packed, slice_packed, whole_features
from shardwise.parallel.roles import Role, Roles, pattern_of
from shardwise.parallel.seams import local_experts, local_heads
from shardwise.parallel.streams import local_dropout, own_stream
from shardwise.parallel.trial import Refused

Forward = Callable[..., Any]


class TensorParallel:
    """A model divided over the ranks of an axis; `whole` says what is not, and why."""

    def __init__(self, mesh: DeviceMesh, sequence: bool) -> None:
        self.mesh, self.sequence = mesh, sequence
        self.whole: dict[str, str] = {}

    def inputs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What to pass to the model's forward for what is the same on every rank of the axis."""
        return {n: to_whole(x, self.mesh) if _is_floats(x) else x for n, x in given.items()}

    @contextmanager
    def active(self) -> Iterator[None]:
        """To be held around forward and backward: what is computed again there must find the same seams."""
        dispatcher: Any = DTensor._op_dispatcher
        before = dispatcher._allow_implicit_replication
        dispatcher._allow_implicit_replication = True
        try:
            with local_heads(self.mesh), local_dropout(self.mesh):
                yield
        finally:
            dispatcher._allow_implicit_replication = before

    def between(self, x: DTensor) -> Placement:
        """How hidden states lie between layers."""
        return Shard(1) if self.sequence and x.ndim == 3 else Replicate()


def divide_tensor(model: nn.Module, roles: Roles, mesh: DeviceMesh, sequence: bool = True) -> TensorParallel:
    """Divides a model in place, on `meta` without memory; `roles` are those of a bare model of its class."""
    tensor = TensorParallel(mesh, sequence)
    parts = {part.name: part for part in roles.parts}
    named = dict(model.named_modules())
    elsewhere = [name for name, module in named.items() if _is_divided(module)]  # the expert axis has been here
    plain = [n for n in named if pattern_of(n) in roles.plain and not any(_within(e, [n]) for e in elsewhere)]
    free = {n: m for n, m in named.items() if n not in elsewhere and not _within(n, plain)}
    cuts = {name: _cut(tensor, name, module, parts.get(pattern_of(name))) for name, module in free.items()}
    for name, module in free.items():
        if is_packed(module):
            slice_packed(module, cuts[name], mesh)
    _divide_parameters(named, cuts, mesh)
    for name in plain:
        tensor.whole[name] = roles.plain[pattern_of(name)]
        _exchange(named[name], _plain, tensor)
    blocks = {module for _, module in find_blocks(model)}
    inside = {module for block in blocks for module in block.modules()} - blocks
    for name, module in free.items():
        part = parts.get(pattern_of(name))
        _hook(tensor, module, cuts[name])
        if cuts[name] == "whole" and _has_matrix(module):
            tensor.whole[name] = part.why if part is not None and part.why else _reason(module, part)
        if module in inside and _owns_matrices(module, cuts, name):
            module.register_forward_pre_hook(partial(_gather_inputs, tensor), with_kwargs=True)
            module.register_forward_hook(partial(_pin_outputs, tensor))
    return tensor


def _within(name: str, outer: Sequence[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in outer)


def _is_divided(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters(recurse=False))


def _is_floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _has_matrix(module: nn.Module) -> bool:
    return any(p.ndim > 1 for p in module.parameters(recurse=False))


def _owns_matrices(module: nn.Module, cuts: Mapping[str, str], name: str) -> bool:
    """Whether a module inside of a block reads the hidden states: it calls layers that are not cut by rows."""
    children = ((cuts.get(f"{name}.{n}"), child) for n, child in module.named_children())
    return any(cut != "row" and _has_matrix(child) for cut, child in children)


def _cut(tensor: TensorParallel, name: str, module: nn.Module, part: Role | None) -> str:
    mesh = tensor.mesh
    if part is None:
        return "whole"
    if is_packed(module) and not can_slice(module, part.cut, mesh):
        tensor.whole[name] = "its packed columns cannot be cut between blocks of a scale"
        return "plain"
    if part.cut == "vocabulary":
        return "column" if is_linear(module) else "vocabulary"
    if part.cut == "experts":
        stacks = [p.shape[0] for p in module.parameters(recurse=False)]
        if min(stacks) == max(stacks) >= mesh.size():
            return "experts"
        tensor.whole[name] = "fewer experts than ranks"
        return "plain"
    return "plain" if is_packed(module) and part.cut == "whole" else part.cut


def _reason(module: nn.Module, part: Role | None) -> str:
    return f"{type(module).__name__} has no part in the plan" if part is None else f"a {part.kind}"


def _placement(module: nn.Module, cut: str, name: str) -> Placement:
    """Of a parameter of a module; adapters beside a matrix are cut along with it."""
    if cut in ("vocabulary", "experts"):
        return Shard(0)
    turned = is_transposed(module) and name == "weight"
    matrix = name in ("weight", "lora_A", "lora_B")
    if cut == "column" and name != "lora_A" and not (name == "ia3_l" and getattr(module, "ia3_feedforward", False)):
        return Shard(1 if turned else 0)
    if cut == "row" and matrix and name != "lora_B":
        return Shard(0 if turned else 1)
    if cut == "row" and name == "ia3_l" and getattr(module, "ia3_feedforward", False):
        return Shard(0)
    return Replicate()


def _divide_parameters(named: Mapping[str, nn.Module], cuts: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Makes every parameter a DTensor; one that several modules share stays one, cut if any of them cuts it."""
    where: dict[nn.Parameter, Placement] = {}
    for name, module in named.items():
        for key, parameter in module.named_parameters(recurse=False):
            wanted = _placement(module, cuts.get(name, "whole"), key)
            if where.setdefault(parameter, wanted).is_replicate():
                where[parameter] = wanted
            elif not wanted.is_replicate() and wanted != where[parameter]:
                raise Refused(f"{name}.{key}", "is shared by layers that would cut it in different ways")
    made = {p: _part_of(p, mesh, place) for p, place in where.items() if not isinstance(p, DTensor)}
    for module in named.values():
        for key, parameter in module.named_parameters(recurse=False):
            module._parameters[key] = made.get(parameter, parameter)


def _part_of(parameter: nn.Parameter, mesh: DeviceMesh, where: Placement) -> nn.Parameter:
    whole = parameter.detach()
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, [where])
    index = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
    local = torch.empty(shape, dtype=whole.dtype, device="meta") if whole.is_meta else whole[index].clone()
    return nn.Parameter(wrap(local, mesh, where, whole.shape), requires_grad=parameter.requires_grad)


def _exchange(module: Any, forward: Forward, tensor: TensorParallel, *args: Any) -> None:
    module.forward = partial(forward, tensor, module, module.forward, *args)


def _hook(tensor: TensorParallel, module: Any, cut: str) -> None:
    if isinstance(module, AdapterLayer):
        module.tensor_mesh = tensor.mesh
    if cut == "column":
        if is_transposed(module):
            module.nf = module.weight.to_local().shape[1]  # Conv1D gives its output this width by name
        _exchange(module, _column, tensor, whole_features(module)[1])
    elif cut == "row":
        _exchange(module, _row, tensor)
        if isinstance(module, LoraLayer):
            module.lora_group = tensor.mesh.get_group()
    elif cut == "experts":
        module.forward = partial(local_experts, tensor.mesh, module, module.forward)
    elif cut == "plain":
        _exchange(module, _plain, tensor)
    elif cut == "vocabulary":
        module.register_forward_hook(partial(_scatter_output, tensor))


def _gather_inputs(tensor: TensorParallel, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def gathered(x: Any) -> Any:
        return gather(x) if isinstance(x, DTensor) and x.placements == (Shard(1),) and x.ndim == 3 else x

    return tree_map(gathered, args), tree_map(gathered, kwargs)


def _pin_outputs(tensor: TensorParallel, module: nn.Module, args: Any, output: Any) -> Any:
    """What is whole gets a whole gradient, whatever reads it."""

    def pinned(x: Any) -> Any:
        whole = isinstance(x, DTensor) and x.placements == (Replicate(),) and x.requires_grad
        return wrap(to_local(x, Replicate()), tensor.mesh, Replicate(), x.shape) if whole else x

    return tree_map(pinned, output)


def gather(x: DTensor) -> DTensor:
    """Whole on every rank; once for all layers that read the same tensor, and so once in backward."""
    if x.placements == (Replicate(),):
        return x
    known: DTensor | None = getattr(x, "_gathered", None)
    if known is None or known.requires_grad != (x.requires_grad and torch.is_grad_enabled()):
        known = x.redistribute(placements=[Replicate()])
        x._gathered = known  # type: ignore[attr-defined]
    return known


def _scatter_output(tensor: TensorParallel, module: nn.Module, args: Any, output: Any) -> Any:
    if not isinstance(output, DTensor):
        return output
    where = tensor.between(output)
    return wrap(to_local(output.redistribute(placements=[where]), where), tensor.mesh, where, output.shape)


def _column(tensor: TensorParallel, module: nn.Module, forward: Forward, width: int, x: torch.Tensor) -> DTensor:
    with local_parameters(module, Partial()):
        y = forward(to_local(gather(to_whole(x, tensor.mesh)), Partial()))
    shape = torch.Size((*y.shape[:-1], width))
    return wrap(y, tensor.mesh, Shard(y.ndim - 1), shape)


def _row(tensor: TensorParallel, module: nn.Module, forward: Forward, x: torch.Tensor) -> DTensor:
    where = Shard(x.ndim - 1)
    local = to_local(to_whole(x, tensor.mesh).redistribute(placements=[where]), where)
    drops = module.training and getattr(module, "lora_dropout", 0)
    with local_parameters(module, Partial(), once=("bias",)), own_stream(tensor.mesh) if drops else nullcontext():
        y = forward(local)
    whole = wrap(y, tensor.mesh, Partial(), y.shape)
    return whole.redistribute(placements=[tensor.between(whole)])


def _plain(tensor: TensorParallel, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Computes a module whole on every rank, on plain tensors."""

    def enter(x: Any) -> Any:
        return to_local(gather(x), Replicate()) if isinstance(x, DTensor) else x

    with local_parameters(module, Replicate(), deep=True):
        made = forward(*tree_map(enter, args), **tree_map(enter, kwargs))
    return tree_map(lambda x: to_whole(x, tensor.mesh) if _is_floats(x) else x, made)
