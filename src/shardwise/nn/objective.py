"""The interface between the loop and an objective.

Sums, not means: the loop divides by the units of the full step (loss tokens; pairs of answers; texts), so that
accumulation over micro-batches and ranks of any shape equals the one big batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Loss:
    """The summed loss of a micro-batch for backward, and by source the sums to report and their units.

    `figures` are further sums over all units, reported as means beside the loss (an accuracy, a margin). Every batch of
    an objective has the same ones in the same order.
    """

    total: torch.Tensor
    by_source: torch.Tensor
    units: torch.Tensor
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def sums(self) -> torch.Tensor:
        """Returns total, figures and, with several sources, the sum of each; detached, still on the device."""
        parts = [self.total.detach()[None], *(f.detach().float()[None] for f in self.figures.values())]
        return torch.cat(parts if len(self.by_source) == 1 else [*parts, self.by_source])

    def uncounted(self) -> Loss:
        """Returns the loss times 0: backward reaches every parameter, and adds nothing."""
        figures = {name: 0 * value for name, value in self.figures.items()}
        return Loss(0 * self.total, 0 * self.by_source, 0 * self.units, figures)


def prepared(objective: Objective, batches: list[Any]) -> list[Any]:
    """Micro-batches with what a frozen second model says about them, for objectives that compare with one.

    Call it with full micro-batches, before their forwards: collective, and in a pipeline a pass of its own.
    """
    ask = getattr(objective, "prepare", None)
    return batches if ask is None else list(ask(batches))


class Objective(Protocol):
    """Anything the loop can train: a forward that returns the summed loss of a micro-batch.

    `figures` names those of its losses, in order. `of_tokens`: the loss is -log p of each loss token, so that its mean
    has a perplexity. One that compares with a second model has `prepare` too (see the function).
    """

    figures: tuple[str, ...]
    of_tokens: bool

    def __call__(self, model: Any, batch: Any) -> Loss: ...


def sum_by_source(losses: torch.Tensor, counts: torch.Tensor, sources: torch.Tensor | None, source_count: int) -> Loss:
    """Returns a loss of flat terms; `counts` is the number of units of each (0 for a term that is 0)."""
    total = losses.sum()
    counts = counts.to(losses.dtype)
    if sources is None:
        return Loss(total, total.detach()[None], counts.sum()[None])
    flat = sources.flatten()
    by_source = losses.new_zeros(source_count)
    units = losses.new_zeros(source_count)
    return Loss(total, by_source.index_add_(0, flat, losses.detach()), units.index_add_(0, flat, counts))
