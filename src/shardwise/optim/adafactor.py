"""Adafactor over sharded parameters: a matrix's second moments are one number per row and one per column.

The rule of torch.optim.Adafactor without scaling by the parameter's size, so that `learning_rate` means the same as for
AdamW: decay 1 - step^-0.8, updates clipped to a root mean square of 1, no first moment.

A matrix is sharded by rows: sums over a row are local, sums over a column and over the full matrix are not. Each step
reduces two buffers over the shard group: the column sums of all matrices, then the size of all updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.effective_device import count_of
from shardwise.optim.codecs import columns
from shardwise.optim.grouped import evaluated
from shardwise.optim.norms import norm_of
from shardwise.optim.shards import division_of, local_grad, local_of, new_step, zeros_beside

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
        """This rank's rows of the gradient."""
        return local_grad(self.parameter)

    @property
    def is_matrix(self) -> bool:
        """Whether column sums span ranks; each matrix of a stack is full on one rank."""
        return self.parameter.ndim == 2


class Adafactor(torch.optim.Optimizer):
    """Adafactor. state[p]: "step" and "row" (one dim less than p, sharded as p is) with "column"; vectors have
    "variance".

    "column" of a matrix is full on every rank.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step on every parameter that has a gradient; collective over the shard group."""
        loss = evaluated(closure)
        work = [self._begin(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        by_group: dict[Any, list[FactoredWork]] = {}
        for entry in work:
            by_group.setdefault(division_of(entry.parameter).group, []).append(entry)
        for group, members in by_group.items():
            _step(members, group)
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
                    state["column"] = zeros_beside(parameter, (*shape[:-2], shape[-1]))
        state["step"] += 1
        return FactoredWork(parameter, group, state, count_of(state["step"]) ** DECAY)


def _step(work: Sequence[FactoredWork], group: dist.ProcessGroup | None) -> None:
    matrices = [entry for entry in work if entry.is_matrix]
    local_sums = [torch.linalg.vector_norm(entry.grad, dim=0).square_() for entry in matrices]
    for entry, column in zip(matrices, _summed(local_sums, group), strict=True):
        entry.state["column"].lerp_(column / entry.parameter.shape[0], entry.rate)
    for entry in work:
        entry.factors = _factors(entry)
    squares = _summed([_size(entry) for entry in work], group)
    for entry, square in zip(work, squares, strict=True):
        _apply(entry, square)


def _factors(work: FactoredWork) -> tuple[Tensor, ...]:
    """Advances the local moments; returns inverse roots by row and column (or element) that scale the gradient."""
    grad = work.grad
    state = work.state
    eps = work.group["eps"]
    if grad.ndim < 2:
        variance = local_of(state["variance"])
        variance.lerp_(grad.square(), work.rate)
        return (variance.clamp(min=eps * eps).rsqrt_(),)
    row = local_of(state["row"])
    column = local_of(state["column"])
    row.lerp_(torch.linalg.vector_norm(grad, dim=-1).square_().div_(grad.size(-1)), work.rate)
    if not work.is_matrix:
        column.lerp_(torch.linalg.vector_norm(grad, dim=-2).square_().div_(grad.size(-2)), work.rate)
    # The mean over rows equals the mean over columns, and every rank has all columns. Row means are clamped at eps², as
    # second moments are; the column factor is relative to the mean, and 0 only if the column never had a gradient.
    mean = column.mean(-1, keepdim=True).clamp_(min=1e-38)
    by_row = row.clamp(min=eps * eps).rsqrt_().unsqueeze(-1)
    by_column = (column / mean).clamp_(min=1e-12).rsqrt_().unsqueeze(-2)
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


def _summed(parts: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Each tensor summed over the group, in one all-reduce."""
    if group is None or not parts:
        return parts
    flat = torch.cat([p.reshape(-1) for p in parts])
    dist.all_reduce(flat, group=group)
    pieces = flat.split([p.numel() for p in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
