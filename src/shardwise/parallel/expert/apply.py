"""Expert parallelism: each rank of a group holds its share of every layer's experts, and tokens travel to them.

A module that is a stack of experts keeps its class and its code; in front of it stands one that sends tokens to the
ranks of their experts (expert_modules.py) and lets the model's own code compute with those that live here. Its weights
are DTensors, `Shard(0)` over the group, so checkpoints and files know them whole.

[Note: one root mesh] FSDP puts its own mesh before that of the experts, and torch does so only for meshes of one root.
Experts have a root of their own (mesh.py): the ranks of a pipeline stage as (replicate, shard, expert). Each module of
`modules` is sharded over the first two, with `placement`, before the block that it is in.

[Note: gradients of experts] An expert sees the tokens of its whole group, so its gradient is already the sum over the
group's ranks, and FSDP adds the groups up and divides by their number. Where dense gradients are averages over n ranks,
those of experts must be divided by the same n: `average_over` sees to the rest. FSDP's own `set_gradient_divide_factor`
does not serve: gloo lacks the operation behind it, and on a mesh of one rank torch 2.13 divides twice in fp16 and fp64.
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
    """A model whose experts are spread: the modules by name, and how many tokens each expert got."""

    named: dict[str, nn.Module]
    mesh: DeviceMesh
    loads: ExpertLoads

    @property
    def modules(self) -> list[nn.Module]:
        """The stacks of experts; tensor parallelism leaves them alone, FSDP takes each as a unit of its own."""
        return list(self.named.values())

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Everything that is spread; ask again after sharding, which makes new ones."""
        return {p for module in self.modules for p in module.parameters()}

    def average_over(self, ranks: int, data: DeviceMesh) -> None:
        """Makes gradients that FSDP averages over `data` what averages over the `ranks` of dense weights are."""
        for module in self.modules:
            module.gradient_scale = data.size() / ranks  # type: ignore[assignment]

    def placement(self, data: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
        """For FSDP: along the experts where each rank gets as many, otherwise within them."""
        size = data.size(data.ndim - 1)

        def place(parameter: nn.Parameter) -> Shard:
            assert isinstance(parameter, DTensor)
            experts, within = parameter.to_local().shape[:2]
            packed = not parameter.is_floating_point()  # filled row by row
            return Shard(0 if experts % size == 0 or within % size or packed else 1)

        return place


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> ExpertParallel:
    """Gives each rank of a mesh its share of every layer's experts, in place; on `meta` it takes no memory."""
    found = find_experts(model)
    if not found:
        raise _nothing(model)
    for name, module in found.items():
        _check(name, module, mesh.size())
    loads = ExpertLoads(
        {name: m for name, m in found.items() if style_of(m) is RoutedExperts},
        torch.device(mesh.device_type),
    )
    spread: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that layers share stays one
    for module in found.values():
        _divide(module, mesh, spread)
    return ExpertParallel(found, mesh, loads)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Stacks of experts by name, of those that can be spread."""
    return {name: module for name, module in model.named_modules() if style_of(module) is not None}


def is_spread(module: nn.Module) -> bool:
    """Whether a module's experts lie on several ranks."""
    return isinstance(module, ShardedExperts)


def count_loads(model: nn.Module, device: torch.device) -> ExpertLoads | None:
    """Counts the tokens of each expert where nothing is spread; None where a model has no experts."""
    found = {
        name: module
        for name, module in find_experts(model).items()
        if style_of(module) is RoutedExperts
    }
    return ExpertLoads(found, device) if found else None


def _nothing(model: nn.Module) -> CannotParallelize:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if (
            "expert" in kind.lower()
            and "shared" not in name
            and any(True for _ in module.parameters())
        ):
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
            raise CannotParallelize(
                f"{name}.{key}",
                f"has {list(parameter.shape)}, which is not one part for each expert",
            )


def _divide(module: Any, mesh: DeviceMesh, spread: dict[nn.Parameter, nn.Parameter]) -> None:
    module.total_experts, module.expert_mesh, module.gradient_scale = experts_in(module), mesh, 1.0
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                if parameter not in spread:
                    spread[parameter] = _share(parameter, mesh)
                owner._parameters[key] = spread[parameter]
    plain, style = type(module), style_of(module)
    assert style is not None
    module.__class__ = type(f"Spread{plain.__name__}", (style, plain), {})


def _share(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    rows = parameter.shape[0] // mesh.size()
    local = parameter.detach()[mesh.get_local_rank() * rows :][:rows].clone(
        memory_format=torch.contiguous_format
    )
    divided = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(divided, requires_grad=parameter.requires_grad)
