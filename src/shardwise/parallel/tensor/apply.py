"""Tensor and sequence parallelism for any model: every parameter a DTensor, every tensor between layers too.

The model's own code runs unchanged: it sees whole shapes (`view(batch, width, heads, -1)` means what it says) while
each rank holds and computes its part. Between the sub-layers of a block the hidden states lie cut along the sequence; a
layer cut by its outputs (column) takes them gathered, a layer cut by its inputs (row) leaves sums that are scattered
along the sequence again: Megatron's two gathers and two scatters a block and direction. What cut layers do is in
cut_layers.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise.core.compat.torch_private import compute_local_shape_and_global_offset
from shardwise.nn.adapters.layers import AdapterLayer, is_linear, is_transposed
from shardwise.nn.models.build import find_blocks
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.tensor.layers import TensorParallel, exchange
from shardwise.parallel.tensor.local import wrap
from shardwise.parallel.tensor.quantized import can_slice, is_packed, slice_packed, whole_features
from shardwise.parallel.tensor.roles import Role, Roles, pattern_of

__all__ = ["TensorParallel", "divide_tensor"]


def divide_tensor(
    model: nn.Module, roles: Roles, mesh: DeviceMesh, sequence: bool = True
) -> TensorParallel:
    """Divides a model in place, on `meta` without memory; `roles` are those of a bare model of its class."""
    tensor = TensorParallel(mesh, sequence)
    parts = {part.name: part for part in roles.parts}
    named = {name: module for name, module in model.named_modules() if not _is_hollow(module)}
    elsewhere = [
        name for name, module in named.items() if _is_divided(module)
    ]  # the expert axis has been here
    plain = [
        n
        for n in named
        if pattern_of(n) in roles.plain and not any(_within(e, [n]) for e in elsewhere)
    ]
    free = {n: m for n, m in named.items() if n not in elsewhere and not _within(n, plain)}
    cuts = {
        name: _cut(tensor, name, module, parts.get(pattern_of(name)))
        for name, module in free.items()
    }
    for name, module in free.items():
        if is_packed(module):
            slice_packed(module, cuts[name], mesh)
    _divide_parameters(named, cuts, mesh)
    for name in plain:
        tensor.whole[name] = roles.plain[pattern_of(name)]
        exchange(named[name], tensor.plain, named[name])
    blocks = dict(find_blocks(model))
    inside = {module for block in blocks.values() for module in block.modules()} - set(
        blocks.values()
    )
    for name, module in free.items():
        part = parts.get(pattern_of(name))
        _hook(tensor, name, module, cuts[name])
        if cuts[name] == "whole" and _has_matrix(module):
            tensor.whole[name] = (
                part.why if part is not None and part.why else _reason(module, part)
            )
        if module in inside and _owns_matrices(module, cuts, name):
            module.register_forward_pre_hook(tensor.gather_inputs, with_kwargs=True)
            module.register_forward_hook(tensor.pin_outputs)
        above = not name or any(_within(block, [name]) for block in blocks if block != name)
        if not above and _is_code(module):
            exchange(module, tensor.carefully, name, module)
    return tensor


def _within(name: str, outer: Sequence[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in outer)


def _is_hollow(module: nn.Module) -> bool:
    """Whether a module's parameters lie on another pipeline stage."""
    return bool(module._parameters) and all(p is None for p in module._parameters.values())


def _is_divided(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters(recurse=False))


def _is_code(module: nn.Module) -> bool:
    """Whether a module does something with parameters besides calling torch on its own."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


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
    if (
        cut == "column"
        and name != "lora_A"
        and not (name == "ia3_l" and getattr(module, "ia3_feedforward", False))
    ):
        return Shard(1 if turned else 0)
    if cut == "row" and matrix and name != "lora_B":
        return Shard(0 if turned else 1)
    if cut == "row" and name == "ia3_l" and getattr(module, "ia3_feedforward", False):
        return Shard(0)
    return Replicate()


def _divide_parameters(
    named: Mapping[str, nn.Module], cuts: Mapping[str, str], mesh: DeviceMesh
) -> None:
    """Makes every parameter a DTensor; one that several modules share stays one, cut if any of them cuts it."""
    where: dict[nn.Parameter, Placement] = {}
    for name, module in named.items():
        for key, parameter in module.named_parameters(recurse=False):
            wanted = _placement(module, cuts.get(name, "whole"), key)
            if where.setdefault(parameter, wanted).is_replicate():
                where[parameter] = wanted
            elif not wanted.is_replicate() and wanted != where[parameter]:
                raise CannotParallelize(
                    f"{name}.{key}", "is shared by layers that would cut it in different ways"
                )
    made = {p: _part_of(p, mesh, place) for p, place in where.items() if not isinstance(p, DTensor)}
    for module in named.values():
        for key, parameter in module.named_parameters(recurse=False):
            module._parameters[key] = made.get(parameter, parameter)


def _part_of(parameter: nn.Parameter, mesh: DeviceMesh, where: Placement) -> nn.Parameter:
    whole = parameter.detach()
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, [where])
    index = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
    local = (
        torch.empty(shape, dtype=whole.dtype, device="meta")
        if whole.is_meta
        else whole[index].clone()
    )
    return nn.Parameter(
        wrap(local, mesh, where, whole.shape), requires_grad=parameter.requires_grad
    )


def _hook(tensor: TensorParallel, name: str, module: nn.Module, cut: str) -> None:
    if isinstance(module, AdapterLayer):
        module.tensor_mesh = tensor.mesh
    if cut == "column":
        exchange(module, tensor.column, module, whole_features(module)[1])
    elif cut == "row":
        exchange(module, tensor.row, module)
    elif cut == "experts":
        exchange(module, tensor.experts, module)
    elif cut == "plain":
        exchange(module, tensor.plain, module)
    elif cut == "vocabulary":
        module.register_forward_hook(tensor.scatter_output)
