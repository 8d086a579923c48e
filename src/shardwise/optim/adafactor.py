"""Adafactor over sharded parameters: a matrix's second moments are one number per row and one per column.

The rule of torch.optim.Adafactor without scaling by the parameter's size, so that `learning_rate` means the same as for
AdamW: decay 1 - step^-0.8, updates clipped to a root mean square of 1, no first moment.

Sums over a dim that is sharded, and over the full matrix, span ranks. Each step reduces two buffers over the groups
that shard the parameters: the sums of rows and columns of all matrices, then the size of all updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwise.core.effective_device import count_of
from shardwise.optim.codecs import columns
from shardwise.optim.grouped import evaluated
from shardwise.optim.norms import norm_of
from shardwise.optim.shards import Cut, cuts_of, local_grad, local_of, local_range, new_step, summed, zeros_beside

DECAY = -0.8
CLIP = 1.0
PIECE = 1 << 23  # elements of an update in memory at a time


@dataclass
class FactoredWork:
    """A parameter in the middle of a step; `factors` are the inverse root of its second moment."""

    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    rate: float
    factors: tuple[Tensor, ...] = ()

    @property
    def grad(self) -> Tensor:
        """This rank's part of the gradient."""
        return local_grad(self.parameter)

    @property
    def is_matrix(self) -> bool:
        """Whether it is one matrix, not a vector or a stack of matrices."""
        return self.parameter.ndim == 2

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """How it is sharded."""
        return cuts_of(self.parameter)

    def cuts_along(self, *dims: int) -> list[Cut]:
        """Those that shard one of the dims, over whose ranks a sum along them has to be completed."""
        return [cut for cut in self.cuts if cut.dim in dims]


class Adafactor(torch.optim.Optimizer):
    """Adafactor. state[p]: "step" and "row" (one dim less than p, sharded as p is) with "column"; vectors have
    "variance".

    "column" of a matrix is full on every rank.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step on every parameter that has a gradient; collective over the groups that shard them."""
        loss = evaluated(closure)
        _step([self._begin(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None])
        return loss

    def _begin(self, parameter: Tensor, group: dict[str, Any]) -> FactoredWork:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = new_step()
            shape = parameter.shape
            if len(shape) < 2:
                state["variance"] = zeros_beside(parameter, shape)
            else:
                state["row"] = zeros_beside(parameter, shape[:-1])
                if len(shape) == 2:
                    state["column"] = torch.zeros(shape[-1], device=local_of(parameter).device)
                else:
                    outer = tuple(range(len(shape) - 2))
                    state["column"] = zeros_beside(parameter, (*shape[:-2], shape[-1]), dims=(*outer, len(shape) - 1))
        state["step"] += 1
        return FactoredWork(parameter, group, state, count_of(state["step"]) ** DECAY)


def _step(work: Sequence[FactoredWork]) -> None:
    _advance([entry for entry in work if entry.parameter.ndim >= 2])
    for entry in work:
        entry.factors = _factors(entry)
    squares = summed([_size(entry) for entry in work], [entry.cuts for entry in work])
    for entry, square in zip(work, squares, strict=True):
        _apply(entry, square)


def _advance(matrices: Sequence[FactoredWork]) -> None:
    """Advances the means of squares by row and by column."""
    parts: list[Tensor] = []
    cuts: list[Sequence[Cut]] = []
    for entry in matrices:
        last = entry.parameter.ndim - 1
        parts.append(torch.linalg.vector_norm(entry.grad, dim=-1).square_())
        cuts.append(entry.cuts_along(last))
        columns_sum = torch.linalg.vector_norm(entry.grad, dim=-2).square_()
        if entry.is_matrix:  # full on every rank
            start, stop = local_range(entry.parameter, 1)
            full = columns_sum.new_zeros(entry.parameter.shape[1])
            full[start:stop] = columns_sum
            columns_sum = full
        parts.append(columns_sum)
        cuts.append(entry.cuts if entry.is_matrix else entry.cuts_along(last - 1))
    sums = iter(summed(parts, cuts))
    for entry in matrices:
        height, width = entry.parameter.shape[-2:]
        local_of(entry.state["row"]).lerp_(next(sums) / width, entry.rate)
        local_of(entry.state["column"]).lerp_(next(sums) / height, entry.rate)


def _factors(work: FactoredWork) -> tuple[Tensor, ...]:
    """Inverse roots by row and column that scale the gradient; of a vector by element, after advancing its moment."""
    state = work.state
    eps = work.group["eps"]
    if work.parameter.ndim < 2:
        variance = local_of(state["variance"])
        variance.lerp_(work.grad.square(), work.rate)
        return (variance.clamp(min=eps * eps).rsqrt_(),)
    row = local_of(state["row"])
    column = local_of(state["column"])
    # The mean over rows equals the mean over columns, and every rank has all columns. Row means are clamped at eps², as
    # second moments are; the column factor is relative to the mean, and 0 only if the column never had a gradient.
    mean = column.mean(-1, keepdim=True).clamp_(min=1e-38)
    by_row = row.clamp(min=eps * eps).rsqrt_().unsqueeze(-1)
    by_column = (column / mean).clamp_(min=1e-12).rsqrt_().unsqueeze(-2)
    if work.is_matrix:
        start, stop = local_range(work.parameter, 1)
        by_column = by_column[:, start:stop]
    return by_row, by_column


def _updates(work: FactoredWork) -> Iterator[tuple[slice, Tensor]]:
    """The local update, unclipped, some rows at a time to bound memory."""
    grad = work.grad
    first, *others = work.factors
    rows = max(1, PIECE // max(1, columns(grad.shape)))
    for top in range(0, grad.shape[0], rows):
        rows_slice = slice(top, top + rows)
        update = grad[rows_slice] * first[rows_slice]
        for other in others:
            update.mul_(other if work.is_matrix else other[rows_slice])
        yield rows_slice, update


def _size(work: FactoredWork) -> Tensor:
    """Sum of squares of the local update."""
    total = torch.zeros(1, device=work.grad.device)
    for _, update in _updates(work):
        total += norm_of(update).square_()
    return total


def _apply(work: FactoredWork, square: Tensor) -> None:
    parameter = local_of(work.parameter)
    group = work.group
    rms = (square / work.parameter.numel()).sqrt_()
    factor = rms.div_(CLIP).clamp_(min=1.0).reciprocal_().mul_(-group["lr"])
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    for rows_slice, update in _updates(work):
        parameter[rows_slice].add_(update.mul_(factor))
