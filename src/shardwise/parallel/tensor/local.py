"""Between DTensors and this rank's part of them, with gradients that say what they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    """DTensor.to_local, whose gradient is laid out as it says: torch's may claim other strides than it has."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, where: Placement, back: Placement | None) -> torch.Tensor:  # type: ignore[override]
        ctx.mesh, ctx.shape, ctx.where, ctx.back = x.device_mesh, x.shape, where, back
        local = local_tensor(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        found = wrap(gradient, ctx.mesh, ctx.where, ctx.shape)
        return (
            (found if ctx.back is None else found.redistribute(placements=[ctx.back])),
            None,
            None,
        )


class _OnFirst(torch.autograd.Function):
    """Added by the first rank alone to what will be summed; the gradient of the sum is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, first: bool) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x) if first else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, None


def to_local(x: DTensor, gradient: Placement) -> torch.Tensor:
    """This rank's part; the gradient of it is a part, a summand or the whole of the gradient."""
    found: torch.Tensor = _ToLocal.apply(x, gradient, None)  # type: ignore[no-untyped-call]
    return found


def to_whole(x: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """What is the same on every rank, as a DTensor."""
    return (
        x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    )


def wrap(local: torch.Tensor, mesh: DeviceMesh, where: Placement, shape: torch.Size) -> DTensor:
    """This rank's part as a DTensor of a whole shape."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), mesh, [where], run_check=False, shape=shape, stride=stride
    )


def offset_of(x: DTensor) -> tuple[int, ...]:
    """Where this rank's part begins."""
    with unset_fake_temporarily():  # it computes with tensors, whose values it needs
        _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(offset)


def _own(parameter: DTensor, gradient: Placement) -> torch.Tensor:
    (where,) = parameter.placements
    if gradient.is_replicate():
        return to_local(parameter.redistribute(placements=[Replicate()]), Replicate())
    if not where.is_replicate():
        return to_local(parameter, where)
    found: torch.Tensor = _ToLocal.apply(parameter, gradient, where)  # type: ignore[no-untyped-call]
    return found


@contextmanager
def local_parameters(
    module: nn.Module, gradient: Placement, once: Sequence[str] = (), deep: bool = False
) -> Iterator[None]:
    """Within it a module (and with `deep` all in it) sees this rank's part of its parameters.

    `gradient`: what the gradient of a parameter is that every rank has whole. `once`: parameters that the first rank
    alone adds to the sum over ranks.
    """
    changed: list[tuple[dict[str, Any], str]] = []
    try:
        for one in module.modules() if deep else (module,):
            for name, parameter in one._parameters.items():
                if not isinstance(parameter, DTensor):
                    continue
                if name in once:
                    first = parameter.device_mesh.get_local_rank() == 0
                    whole: Any = to_local(parameter, Replicate())
                    value = _OnFirst.apply(whole, first)  # type: ignore[no-untyped-call]
                else:
                    value = _own(parameter, gradient)
                one.__dict__[name] = value  # before the parameters, where Python looks first
                changed.append((one.__dict__, name))
        yield
    finally:
        for own, name in changed:
            own.pop(name, None)
