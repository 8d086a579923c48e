"""Log-probabilities of answers by the model and its reference, for preference objectives."""

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

# Given the model, a context with the model as it was before training.
Reference = Callable[[Any], AbstractContextManager[Any]]


class AnswerLogProbs:
    """Sums the log-probabilities of the trained tokens of every conversation of a batch."""

    def __init__(self, model: Any, apart: bool) -> None:
        self._causal = CausalObjective(model, apart)

    def __call__(self, model: Any, batch: PreferenceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and number of trained tokens of each conversation, without host syncs."""
        by_conversation = replace(batch, sources=batch.conversations)
        logits, labels, numbers = self._causal.logits(model, by_conversation)
        assert numbers is not None
        labels = labels.flatten()
        numbers = numbers.flatten()
        losses = token_losses(logits.flatten(0, 1), labels)
        zeros = losses.new_zeros(batch.count + 1)  # the last one is for padding
        sums = zeros.index_add(0, numbers, -losses)
        counts = zeros.index_add(0, numbers, (labels != IGNORE).to(losses.dtype))
        return sums[:-1], counts[:-1]

    def before(self, reference: Reference, model: Any, batch: PreferenceBatch) -> torch.Tensor:
        """The sums by the reference, without gradients."""
        with torch.no_grad(), reference(model) as frozen:
            return self(frozen, batch)[0]


def judged_loss(losses: torch.Tensor, batch: PreferenceBatch, **figures: torch.Tensor) -> Loss:
    """The loss from one term for each pair or single answer."""
    loss = sum_by_source(losses, torch.ones_like(losses), batch.answer_sources, batch.source_count)
    sums = {name: value.detach().float().sum() for name, value in figures.items()}
    return replace(loss, figures=sums)
