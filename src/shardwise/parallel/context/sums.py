"""Sums over the ranks that hold parts of the same sequences, for losses that need whole answers.

Every rank computes the full loss from the full sums, and counts 1/n of it. The gradient of the sum
is therefore multiplied by n; with respect to a rank's own part it is then that of the full loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def sum_parts(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum of the ranks' parts; without a group, the part itself."""
    if group is None:
        return part
    summed: torch.Tensor = _Summed.apply(part, group)  # type: ignore[no-untyped-call]
    return summed


def shares_of(group: dist.ProcessGroup | None) -> int:
    """The number of ranks among which a loss of full sums is divided."""
    return 1 if group is None else dist.get_world_size(group)


class _Summed(torch.autograd.Function):
    """All-reduce; gradients are multiplied by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.ranks = dist.get_world_size(group)
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.ranks, None
