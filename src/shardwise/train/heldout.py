"""The loss over held-out sequences: one function for evaluations during training and for `shardwise eval`.

Sums are exact (float64 on the host) and each sequence counts once, so the figure does not depend on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.data.epochs import micro_batches
from shardwise.data.loader import Loader
from shardwise.nn.objective import Loss, Objective
from shardwise.train.meter import told_by_source

Several = Callable[[list[Any]], list[Loss]]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss per unit, and what else the record tells: the objective's figures, and each source."""

    loss: float
    told: dict[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        """Every figure by its name."""
        return {"loss": self.loss, **self.told}


def summed_losses(
    model: Any,
    objective: Objective,
    loader: Loader,
    micro: int,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
    each: Callable[[torch.Tensor], None] = lambda _: None,
    several: Several | None = None,
    together: int = 1,
) -> torch.Tensor:
    """This rank's sums (row 0) and their units (row 1): of the loss, of each figure, of the loss by source.

    `each` is given those of every micro-batch. Under `no_grad`, with the model in evaluation mode. `several` computes
    the losses of `together` micro-batches where one by one will not do: a pipeline, whose last stage alone knows them.
    """
    sequences = loader.epoch_sequences()
    sums = torch.zeros(2, 1 + len(objective.figures) + loader.source_count, dtype=torch.float64)
    rounds = micro_batches(sequences, micro, rank, ranks)
    for first in range(0, len(rounds), together):
        turn = rounds[first : first + together]
        # A rank without a sequence still takes part (the forward is collective) but counts nothing.
        batches = [
            loader.collate([loader.sequence(i) for i in mine] or [loader.sequence(0)]).to(device)
            for mine in turn
        ]
        losses = several(batches) if several else [objective(model, batch) for batch in batches]
        for mine, loss in zip(turn, losses, strict=bool(losses)):
            if not len(mine):
                continue
            figures = [loss.figures[name].detach().float() for name in objective.figures]
            part = torch.stack([
                torch.stack([loss.total.detach(), *figures, *loss.by_source]),
                torch.stack([*[loss.units.sum()] * (1 + len(figures)), *loss.units]),
            ]).cpu().double()  # fmt: skip
            sums += part
            each(part)
    return sums


def evaluation_of(sums: torch.Tensor, objective: Objective, names: list[str]) -> Evaluation:
    """Means from the sums of all ranks."""
    (total, *others), (units, *counts) = sums.tolist()
    loss, figures = total / max(units, 1), objective.figures
    means = {name: value / max(units, 1) for name, value in zip(figures, others, strict=False)}
    # Of the tokens alone: the loss may have more in it (routers').
    told = (
        {"perplexity": math.exp(min(means.get("cross_entropy", loss), 50))}
        if objective.of_tokens
        else {}
    )
    told |= means
    told |= told_by_source(names, others[len(figures) :], [int(n) for n in counts[len(figures) :]])
    return Evaluation(loss, told)
