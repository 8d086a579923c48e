"""Gradients of parameters that are kept in bf16, taken in the fp32 they were reduced in.

FSDP casts a reduced gradient to the parameter's type, so that sums over micro-batches would be rounded to bf16 again and
again. Its all-reduce hook shows the fp32 buffer of a unit just before; each parameter's part of it lies where
the cast gradient lies in its own buffer, a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Take = Callable[[nn.Parameter, torch.Tensor], None]


def take_reduced_gradients(units: Sequence[FSDPModule], parameters: Sequence[nn.Parameter], take: Take) -> None:
    """Calls `take(parameter, fp32 gradient)` for every reduced gradient, during backward; `.grad` stays None."""
    latest: list[torch.Tensor] = []

    def reduced(buffer: torch.Tensor) -> None:
        latest[:] = [buffer]

    def accumulated(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter.grad, DTensor)
        cast, parameter.grad = parameter.grad._local_tensor, None
        exact = latest[0].as_strided(cast.size(), cast.stride(), cast.storage_offset())
        take(parameter, sharded_like(exact, parameter))

    for unit in units:
        unit.set_all_reduce_hook(reduced)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(accumulated)


def sharded_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A rank's part as a tensor that is sharded like the parameter."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
