"""Tensor and sequence parallelism for any model, with DTensors for parameters and activations.

The model's own code runs unchanged: it sees full shapes (`view(batch, width, heads, -1)` has its
usual meaning) while each rank stores and computes its shards. Between the sub-layers of a block the
hidden states are sharded along the sequence. Layers cut by their outputs (column) gather them;
layers cut by their inputs (row) reduce-scatter their outputs along the sequence: Megatron's two
gathers and two scatters per block and direction. layers.py has the forwards of sharded layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise.config.axes import HEADS, first_of
from shardwise.core.compat.torch_private import compute_local_shape_and_global_offset
from shardwise.nn.adapters.layers import AdapterLayer, is_linear, is_transposed
from shardwise.nn.models.build import find_blocks
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.tensor.layers import TensorParallel, exchange
from shardwise.parallel.tensor.local import wrap
from shardwise.parallel.tensor.local_blocks import LocalBlock, Slot
from shardwise.parallel.tensor.local_trial import (
    Kind,
    LocalKind,
    kind_of,
    norm_width,
    shared_counts,
)
from shardwise.parallel.tensor.quantized import can_slice, full_features, is_packed, slice_packed
from shardwise.parallel.tensor.roles import Role, Roles, pattern_of

__all__ = ["TensorParallel", "apply_tensor_parallel"]


def apply_tensor_parallel(
    model: nn.Module,
    roles: Roles,
    mesh: DeviceMesh,
    sequence: bool = True,
    local: Mapping[Kind, LocalKind] = MappingProxyType({}),
) -> TensorParallel:
    """Shards a model in place over `mesh` and returns what its forward has to run under.

    Takes no memory for a model on `meta`. `roles` are those of an unsharded model of its class,
    and `local` says which kinds of blocks may run on plain tensors.
    """
    tensor = TensorParallel(mesh, sequence)
    blocks = dict(find_blocks(model))
    own_forwards = {name: block.forward for name, block in blocks.items()}
    role_of = {role.name: role for role in roles.parts}
    modules = {name: module for name, module in model.named_modules() if not _is_hollow(module)}
    # Modules that expert parallelism has sharded already.
    sharded = [name for name, module in modules.items() if _has_dtensors(module)]
    plain: list[str] = []
    for name in modules:
        if pattern_of(name) in roles.plain and not any(_is_within(n, [name]) for n in sharded):
            plain.append(name)
    layers: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if name not in sharded and not _is_within(name, plain):
            layers[name] = module
    cuts: dict[str, str] = {}
    for name, module in layers.items():
        cuts[name] = _cut(tensor, name, module, role_of.get(pattern_of(name)))
    for name, module in layers.items():
        if is_packed(module):
            slice_packed(module, cuts[name], mesh)
    _shard_parameters(modules, cuts, mesh)
    for name in plain:
        tensor.unsharded[name] = roles.plain[pattern_of(name)]
        exchange(modules[name], tensor.plain, modules[name])
    for name, module in layers.items():
        _replace_forward(tensor, module, cuts[name])
        if cuts[name] == "whole" and _has_matrix(module):
            tensor.unsharded[name] = _reason(module, role_of.get(pattern_of(name)))
    _hook_blocks(tensor, blocks, layers, cuts)
    if sequence and _divides_heads(model, mesh.size()):
        for name, block in blocks.items():
            known = local.get(kind_of(block))
            if known is None or known.refusal or not _may_run_locally(block):
                continue
            if _is_even(name, block, known, cuts, mesh.size()):
                _run_locally(tensor, name, block, own_forwards[name], known, cuts)
    return tensor


def _divides_heads(model: Any, ranks: int) -> bool:
    """Whether each rank has as many heads, of keys too."""
    text = model.config.get_text_config(decoder=True)
    heads = first_of(text, HEADS) or 0
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    return heads % ranks == 0 and key_heads % ranks == 0


def _may_run_locally(block: nn.Module) -> bool:
    """Whether a block is of this stage and has nothing beside what was tried: adapters, dropout."""
    for module in block.modules():
        if isinstance(module, AdapterLayer) or is_packed(module):
            return False
        if getattr(module, "p", 0) and isinstance(module, nn.Dropout):
            return False
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value:
                return False
    parameters = list(block.parameters())  # none in blocks of other pipeline stages
    return bool(parameters) and all(isinstance(p, DTensor) for p in parameters)


def _is_even(
    name: str, block: nn.Module, known: LocalKind, cuts: Mapping[str, str], ranks: int
) -> bool:
    """Whether the ranks divide experts, and each part of fused projections."""
    for inner, module in block.named_modules():
        is_stack = cuts.get(f"{name}.{inner}") == "experts"
        if is_stack and any(p.shape[0] % ranks for p in module.parameters(recurse=False)):
            return False
    return known.is_even(block, ranks)


def _run_locally(
    tensor: TensorParallel,
    name: str,
    block: nn.Module,
    compute: Callable[..., Any],
    known: LocalKind,
    cuts: Mapping[str, str],
) -> None:
    slots: list[Slot] = []
    attributes: dict[nn.Module, dict[str, Any]] = {}
    ranks = tensor.mesh.size()
    for inner, module in block.named_modules():
        cut = cuts.get(f"{name}.{inner}" if inner else name, "whole")
        vars(module)["local_run"] = tensor.run
        slots += _slots(tensor, module, cut, known, known.sizes(block, inner), inner)
        shares = known.shares.get(inner, ())
        counts = shared_counts(module, shares, ranks)
        if cut == "column" and is_transposed(module):
            counts["nf"] = vars(module)["nf"] // ranks
        if counts:
            attributes[module] = counts
        if cut == "whole" and (features := norm_width(module)):
            exchange(module, tensor.run.norm, features)
    tensor.local[block] = LocalBlock(
        tensor.run, tensor.mesh, compute, block.forward, tuple(slots), attributes
    )
    block.forward = tensor.local[block]


def _slots(
    tensor: TensorParallel,
    module: Any,
    cut: str,
    known: LocalKind,
    sizes: tuple[int, ...],
    inner: str,
) -> list[Slot]:
    """The parameters of a module that a local block replaces."""
    slots = []
    for key, parameter in module._parameters.items():
        # Experts that expert parallelism has sharded look after their own.
        if parameter is None or parameter.device_mesh != tensor.mesh:
            continue
        dim = 1 if key == "weight" and is_transposed(module) else 0
        heads = key in known.shares.get(inner, ())
        slots.append(Slot(module, key, cut == "row" and key == "bias", heads, sizes, dim))
    return slots


def _hook_blocks(
    tensor: TensorParallel,
    blocks: Mapping[str, nn.Module],
    layers: Mapping[str, nn.Module],
    cuts: Mapping[str, str],
) -> None:
    """Hooks the modules inside blocks, and gives the model's own code a fallback."""
    inside: set[nn.Module] = set()
    for block in blocks.values():
        inside.update(block.modules())
    inside -= set(blocks.values())
    for name, module in layers.items():
        if module in inside and _owns_matrices(module, cuts, name):
            has_columns = any(
                cuts.get(f"{name}.{n}") == "column" for n, _ in module.named_children()
            )
            module.register_forward_pre_hook(
                partial(tensor.gather_inputs, has_columns), with_kwargs=True
            )
            module.register_forward_hook(tensor.pin_outputs)
        holds_block = not name or any(_is_within(b, [name]) for b in blocks if b != name)
        if not holds_block and _has_code(module):
            exchange(module, tensor.with_fallback, name, module)


def _is_within(name: str, outer: Iterable[str]) -> bool:
    return any(name == other or name.startswith(other + ".") for other in outer)


def _is_hollow(module: nn.Module) -> bool:
    """Whether a module's parameters are on another pipeline stage."""
    return bool(module._parameters) and all(p is None for p in module._parameters.values())


def _has_dtensors(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters(recurse=False))


def _has_code(module: nn.Module) -> bool:
    """Whether a module does more with parameters than call a torch function on its own."""
    has_children = next(module.children(), None) is not None
    return has_children and next(module.parameters(), None) is not None


def _has_matrix(module: nn.Module) -> bool:
    return any(p.ndim > 1 for p in module.parameters(recurse=False))


def _owns_matrices(module: nn.Module, cuts: Mapping[str, str], name: str) -> bool:
    """Whether a module inside a block reads the hidden states: it has layers not cut by rows."""
    for child_name, child in module.named_children():
        if cuts.get(f"{name}.{child_name}") != "row" and _has_matrix(child):
            return True
    return False


def _cut(tensor: TensorParallel, name: str, module: nn.Module, role: Role | None) -> str:
    mesh = tensor.mesh
    if role is None:
        return "whole"
    if is_packed(module) and not can_slice(module, role.cut, mesh):
        tensor.unsharded[name] = "its packed columns cannot be cut between blocks of a scale"
        return "plain"
    if role.cut == "vocabulary":
        return "column" if is_linear(module) else "vocabulary"
    if role.cut == "experts":
        counts = [p.shape[0] for p in module.parameters(recurse=False)]
        if min(counts) == max(counts) >= mesh.size():
            return "experts"
        tensor.unsharded[name] = "fewer experts than ranks"
        return "plain"
    return "plain" if is_packed(module) and role.cut == "whole" else role.cut


def _reason(module: nn.Module, role: Role | None) -> str:
    """Why a module is not sharded."""
    if role is None:
        return f"{type(module).__name__} has no part in the plan"
    return role.why or f"a {role.kind}"


def _placement(module: nn.Module, cut: str, name: str) -> Placement:
    """Returns the placement of a parameter; an adapter's parameters follow their matrix."""
    if cut in ("vocabulary", "experts"):
        return Shard(0)
    if name == "ia3_l" and getattr(module, "ia3_feedforward", False):  # it scales the inputs
        return Shard(0) if cut == "row" else Replicate()
    transposed = is_transposed(module) and name == "weight"
    if cut == "column" and name != "lora_A":
        return Shard(1 if transposed else 0)
    if cut == "row" and name in ("weight", "lora_A"):
        return Shard(0 if transposed else 1)
    return Replicate()


def _shard_parameters(
    modules: Mapping[str, nn.Module], cuts: Mapping[str, str], mesh: DeviceMesh
) -> None:
    """Makes every parameter a DTensor.

    A parameter that several modules share stays shared, and is sharded if any of them shards it.
    """
    placements: dict[nn.Parameter, Placement] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            placement = _placement(module, cuts.get(name, "whole"), key)
            if placements.setdefault(parameter, placement).is_replicate():
                placements[parameter] = placement
            elif not placement.is_replicate() and placement != placements[parameter]:
                raise CannotParallelize(
                    f"{name}.{key}", "is shared by layers that would cut it in different ways"
                )
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, placement in placements.items():
        if not isinstance(parameter, DTensor):
            sharded[parameter] = _sharded(parameter, mesh, placement)
    for module in modules.values():
        for key, parameter in module.named_parameters(recurse=False):
            module._parameters[key] = sharded.get(parameter, parameter)


def _sharded(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    full = parameter.detach()
    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, [placement])
    if full.is_meta:
        local = torch.empty(shape, dtype=full.dtype, device="meta")
    else:
        index = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
        local = full[index].clone()
    shards = wrap(local, mesh, placement, full.shape)
    return nn.Parameter(shards, requires_grad=parameter.requires_grad)


def _replace_forward(tensor: TensorParallel, module: nn.Module, cut: str) -> None:
    if isinstance(module, AdapterLayer):
        module.tensor_mesh = tensor.mesh
    if cut == "column":
        exchange(module, tensor.column, module, full_features(module)[1])
    elif cut == "row":
        exchange(module, tensor.row, module)
    elif cut == "experts":
        exchange(module, tensor.experts, module)
    elif cut == "plain":
        exchange(module, tensor.plain, module)
    elif cut == "vocabulary":
        module.register_forward_hook(tensor.scatter_output)
