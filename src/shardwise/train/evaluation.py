"""The loss over held-out sequences, for evaluations during training and for `shardwise eval`.

Sums are exact (float64 on the host) and each sequence counts once, so the result does not depend on
the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.data.epochs import micro_batches
from shardwise.data.loader import Loader
from shardwise.nn.objective import Loss, Objective, prepared
from shardwise.train.meter import figures_by_source

Several = Callable[[list[Any]], list[Loss]]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per unit, and further figures: the objective's own, and those of each source."""

    loss: float
    figures: dict[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        """Every figure, by name."""
        return {"loss": self.loss, **self.figures}


@dataclass(frozen=True)
class HeldoutBatching:
    """How held-out sequences are split: micro-batches of `micro`, over `ranks`, `together` a call.

    `together` > 1 is for pipelines, which take several micro-batches at a time.
    """

    micro: int
    rank: int = 0
    ranks: int = 1
    together: int = 1


def summed_losses(
    model: Any,
    objective: Objective,
    loader: Loader,
    rounds: HeldoutBatching,
    device: torch.device,
    each: Callable[[torch.Tensor], None] = lambda _: None,
    several: Several | None = None,
) -> torch.Tensor:
    """This rank's sums (row 0) and units (row 1) of the loss, each figure, the loss by source.

    Call it under `no_grad`, with the model in evaluation mode. `each` receives the sums and units
    of every micro-batch. `several` computes the losses of `rounds.together` micro-batches at once,
    for pipelines, where only the last stage has them.
    """
    sequences = loader.epoch_sequences()
    sums = torch.zeros(2, 1 + len(objective.figures) + loader.source_count, dtype=torch.float64)
    indices = micro_batches(sequences, rounds.micro, rounds.rank, rounds.ranks)
    for first in range(0, len(indices), rounds.together):
        turn = indices[first : first + rounds.together]
        batches = []
        for micro in turn:
            # A rank without a sequence takes part (the forward is collective) but counts nothing.
            samples = [loader.sequence(index) for index in micro] or [loader.sequence(0)]
            batches.append(loader.collate(samples).to(device))
        if several is not None:
            losses = several(batches)
        else:
            losses = [objective(model, batch) for batch in prepared(objective, batches)]
        for micro, loss in zip(turn, losses, strict=bool(losses)):
            if len(micro):
                part = _sums_and_units(loss, objective)
                sums += part
                each(part)
    return sums


def _sums_and_units(loss: Loss, objective: Objective) -> torch.Tensor:
    figures = [loss.figures[name].detach().float() for name in objective.figures]
    sums = torch.stack([loss.total.detach(), *figures, *loss.by_source])
    all_units = [loss.units.sum()] * (1 + len(figures))
    units = torch.stack([*all_units, *loss.units])
    return torch.stack([sums, units]).cpu().double()


def evaluation_of(sums: torch.Tensor, objective: Objective, names: list[str]) -> Evaluation:
    """Means from the sums and units of all ranks (see `summed_losses`)."""
    (total, *others), (units, *counts) = sums.tolist()
    loss = total / max(units, 1)
    means = {
        name: value / max(units, 1) for name, value in zip(objective.figures, others, strict=False)
    }
    figures: dict[str, Any] = {}
    if objective.of_tokens:
        # From the tokens' cross entropy: the loss may include terms of routers.
        figures["perplexity"] = math.exp(min(means.get("cross_entropy", loss), 50))
    figures |= means
    first = len(objective.figures)
    source_counts = [int(count) for count in counts[first:]]
    figures |= figures_by_source(names, others[first:], source_counts)
    return Evaluation(loss, figures)
