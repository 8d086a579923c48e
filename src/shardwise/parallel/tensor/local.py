"""Conversions between DTensors and local shards, with explicit gradient placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwise.core.compat.torch_private import (
    compute_local_shape_and_global_offset,
    local_tensor,
    unset_fake_temporarily,
)


class _ToLocal(torch.autograd.Function):
    """DTensor.to_local whose gradient is contiguous: torch's may claim strides it does not have."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: DTensor, placement: Placement, target: Placement | None
    ) -> torch.Tensor:
        ctx.mesh = x.device_mesh
        ctx.shape = x.shape
        ctx.placement = placement
        ctx.target = target
        local = local_tensor(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        result = wrap(gradient, ctx.mesh, ctx.placement, ctx.shape)
        if ctx.target is not None:
            result = result.redistribute(placements=[ctx.target])
        return result, None, None


class _OnFirst(torch.autograd.Function):
    """Zero except on the first rank, for a summand of a sum; its gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: bool) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x) if first else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, None


def to_local(x: DTensor, gradient: Placement) -> torch.Tensor:
    """Returns the local shard; `gradient` is the placement of the gradient with respect to it."""
    local: torch.Tensor = _ToLocal.apply(x, gradient, None)  # type: ignore[no-untyped-call]
    return local


def redistribute_local(
    x: DTensor, placement: Placement, gradient: Placement | None = None
) -> torch.Tensor:
    """Returns the local shard under another placement, by default that of its gradient too."""
    return to_local(x.redistribute(placements=[placement]), gradient or placement)


def to_whole(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Returns a tensor that is equal on every rank as a replicated DTensor, a DTensor unchanged."""
    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def wrap(local: torch.Tensor, mesh: DeviceMesh, where: Placement, shape: torch.Size) -> DTensor:
    """Returns the local shard as a DTensor of the full `shape`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), mesh, [where], run_check=False, shape=shape, stride=stride
    )


def offset_of(x: DTensor) -> tuple[int, ...]:
    """Returns where the local shard begins in the full tensor, by dim."""
    with unset_fake_temporarily():  # torch computes it with tensors whose values it reads
        _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(offset)


def _local_parameter(parameter: DTensor, gradient: Placement) -> torch.Tensor:
    (placement,) = parameter.placements
    if gradient.is_replicate():
        return redistribute_local(parameter, Replicate())
    if not placement.is_replicate():
        return to_local(parameter, placement)
    local: torch.Tensor = _ToLocal.apply(  # type: ignore[no-untyped-call]
        parameter, gradient, placement
    )
    return local


@cache
def on_mesh(replacement: Callable[..., Any], mesh: DeviceMesh, original: Any) -> Any:
    """A function to put in the place of another; always the same one, for compiled code asks."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(mesh, original, *args, **kwargs)

    return call


@contextmanager
def local_parameters(
    module: nn.Module, gradient: Placement, once: Sequence[str] = (), deep: bool = False
) -> Iterator[None]:
    """Within it a module (with `deep`, its submodules too) sees the local shards of its parameters.

    `gradient`: the placement of the gradients of replicated parameters. `once`: parameters that
    only the first rank adds to a sum over ranks.
    """
    overridden: list[tuple[dict[str, Any], str]] = []
    try:
        for submodule in module.modules() if deep else (module,):
            for name, parameter in submodule._parameters.items():
                if not isinstance(parameter, DTensor):
                    continue
                if name in once:
                    first = parameter.device_mesh.get_local_rank() == 0
                    full: Any = to_local(parameter, Replicate())
                    value = _OnFirst.apply(full, first)  # type: ignore[no-untyped-call]
                else:
                    value = _local_parameter(parameter, gradient)
                # Python looks here before it looks among the parameters.
                submodule.__dict__[name] = value
                overridden.append((submodule.__dict__, name))
        yield
    finally:
        for attributes, name in overridden:
            attributes.pop(name, None)
