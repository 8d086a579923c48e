"""Expert parallelism: each rank of a group holds a share of every layer's experts.

A stack of experts keeps its class and code. A subclass (modules.py) sends tokens to the ranks of
their experts, where the model's own code computes with the local ones. The weights are DTensors,
`Shard(0)` over the group, so checkpoints and files hold them unsharded.

[Note: one root mesh] FSDP puts its mesh before that of the experts, which torch supports only for
meshes of one root. Experts have a root of their own (distributed/mesh.py): the ranks of a pipeline
stage as (replicate, shard, expert). Each module of `modules` is sharded over the first two, with
`placement`, before the block that contains it.

[Note: gradients of experts] An expert sees the tokens of its full group: its gradient is the sum
over the group's ranks, and FSDP averages it over the groups. Where dense gradients are averages
over n ranks, those of experts must be divided by the same n: `average_over` does that. FSDP's
`set_gradient_divide_factor` does not work here: gloo lacks the operation behind it, and on a mesh
of one rank torch 2.13 divides twice in fp16 and fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.nn.adapters.layers import is_added
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.expert.load_counts import ExpertLoads
from shardwise.parallel.expert.modules import RoutedExperts, ShardedExperts, experts_in, style_of


@dataclass(frozen=True)
class ExpertParallel:
    """A model's sharded stacks of experts by name, and how many tokens each expert got."""

    named: dict[str, nn.Module]
    mesh: DeviceMesh
    loads: ExpertLoads

    @property
    def modules(self) -> list[nn.Module]:
        """The stacks: tensor parallelism skips them, and each is an FSDP unit of its own."""
        return list(self.named.values())

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters of all stacks; sharding replaces them, so read this again afterwards."""
        return {p for module in self.modules for p in module.parameters()}

    def average_over(self, ranks: int, data: DeviceMesh) -> None:
        """Scales gradients, which FSDP averages over `data`, to averages over `ranks`."""
        for module in self.modules:
            module.gradient_scale = data.size() / ranks  # type: ignore[assignment]

    def placement(self, data: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
        """FSDP's placement: along the experts if they divide evenly, otherwise within them."""
        size = data.size(data.ndim - 1)

        def place(parameter: nn.Parameter) -> Shard:
            assert isinstance(parameter, DTensor)
            experts, within = parameter.to_local().shape[:2]
            quantized = not parameter.is_floating_point()  # filled row by row
            if experts % size == 0 or within % size or quantized:
                return Shard(0)
            return Shard(1)

        return place


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> ExpertParallel:
    """Shards every layer's experts over a mesh, in place; takes no memory on `meta`."""
    stacks = find_experts(model)
    if not stacks:
        raise _no_experts(model)
    for name, stack in stacks.items():
        _check(name, stack, mesh.size())
    loads = ExpertLoads(_routed(stacks), torch.device(mesh.device_type))
    sharded: dict[nn.Parameter, nn.Parameter] = {}  # keeps parameters shared by layers shared
    for stack in stacks.values():
        _shard_stack(stack, mesh, sharded)
    return ExpertParallel(stacks, mesh, loads)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Stacks of experts that can be sharded, by name."""
    return {name: module for name, module in model.named_modules() if style_of(module) is not None}


def is_spread(module: nn.Module) -> bool:
    """Whether a module is a stack of experts that is sharded over ranks."""
    return isinstance(module, ShardedExperts)


def count_loads(model: nn.Module, device: torch.device) -> ExpertLoads | None:
    """Counts the tokens of each expert without expert parallelism; None for a dense model."""
    stacks = _routed(find_experts(model))
    return ExpertLoads(stacks, device) if stacks else None


def _routed(stacks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: stack for name, stack in stacks.items() if style_of(stack) is RoutedExperts}


def _no_experts(model: nn.Module) -> CannotParallelize:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "expert" not in kind.lower() or "shared" in name:
            continue
        if next(module.parameters(), None) is not None:
            return CannotParallelize(name, f"{kind} keeps or calls its experts in a way of its own")
    return CannotParallelize("", "has no experts")


def _check(name: str, module: nn.Module, ranks: int) -> None:
    total = experts_in(module)
    if total % ranks:
        raise CannotParallelize(name, f"{total} experts cannot be divided over {ranks} ranks")
    for key, parameter in module.named_parameters():
        if is_added(key):
            raise CannotParallelize(f"{name}.{key}", "adapters on experts cannot be spread")
        if parameter.ndim < 2 or parameter.shape[0] % total:
            problem = f"has {list(parameter.shape)}, which is not one part for each expert"
            raise CannotParallelize(f"{name}.{key}", problem)


def _shard_stack(module: Any, mesh: DeviceMesh, sharded: dict[nn.Parameter, nn.Parameter]) -> None:
    module.total_experts = experts_in(module)
    module.expert_mesh = mesh
    module.gradient_scale = 1.0
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if parameter not in sharded:
                sharded[parameter] = _shard_parameter(parameter, mesh)
            owner._parameters[key] = sharded[parameter]
    plain = type(module)
    style = style_of(module)
    assert style is not None
    module.__class__ = type(f"Spread{plain.__name__}", (style, plain), {})


def _shard_parameter(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    rows = parameter.shape[0] // mesh.size()
    start = mesh.get_local_rank() * rows
    local = parameter.detach()[start : start + rows]
    local = local.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)
