"""What objectives over judged answers share: the log-probability of each answer, by the model and by its reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from shardwise.data.loader import IGNORE
from shardwise.data.preference_layout import PreferenceBatch
from shardwise.nn.objective import Loss, sum_by_source
from shardwise.objectives.causal import CausalObjective
from shardwise.objectives.head import token_losses

Reference = Callable[
    [Any], AbstractContextManager[Any]
]  # the model as it was before training, from the model


class AnswerLogProbs:
    """Adds up the log-probabilities of the learned tokens of every conversation of a batch."""

    def __init__(self, model: Any, apart: bool) -> None:
        self._causal = CausalObjective(model, apart)

    def __call__(self, model: Any, batch: PreferenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """For each conversation the sum and the number of learned tokens. Never waits for the device."""
        logits, labels, numbers = self._causal.logits(
            model, replace(batch, sources=batch.conversations)
        )
        assert numbers is not None
        flat, numbers = labels.flatten(), numbers.flatten()
        losses = token_losses(logits.flatten(0, 1), flat)
        sums, counts = (
            losses.new_zeros(batch.count + 1) for _ in range(2)
        )  # the last is of padding
        sums = sums.index_add(0, numbers, -losses)
        counts = counts.index_add(0, numbers, (flat != IGNORE).to(losses.dtype))
        return sums[:-1], counts[:-1]

    def before(self, reference: Reference, model: Any, batch: PreferenceBatch) -> torch.Tensor:
        """The sums as the reference has them, without gradients."""
        with torch.no_grad(), reference(model) as frozen:
            return self(frozen, batch)[0]


def judged_loss(losses: torch.Tensor, batch: PreferenceBatch, **figures: torch.Tensor) -> Loss:
    """One term for each pair or single answer."""
    loss = sum_by_source(losses, torch.ones_like(losses), batch.answer_sources, batch.source_count)
    return replace(
        loss, figures={name: value.detach().float().sum() for name, value in figures.items()}
    )
