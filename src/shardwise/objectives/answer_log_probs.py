"""Log-probabilities of answers by the model and its reference, for preference objectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data.loader import IGNORE
from shardwise.data.preference_layout import PreferenceBatch
from shardwise.nn.objective import Loss, sum_by_source
from shardwise.objectives.causal import CausalObjective
from shardwise.objectives.head import token_losses
from shardwise.parallel.context.sums import shares_of, sum_parts

# What a function makes of the model before training and this rank's part of each micro-batch; on
# pipeline stages before the last, what another makes of the part alone (ParallelContext.answers).
Reference = Callable[
    [list[Any], Callable[[Any, Any], torch.Tensor], Callable[[Any], torch.Tensor]],
    list[torch.Tensor],
]


class AnswerLogProbs:
    """Sums the log-probabilities of the trained tokens of every conversation of a batch.

    `group`: ranks that have parts of the same conversations. Each gets the full sums, for the loss
    is no sum over tokens.
    """

    def __init__(self, model: Any, apart: bool, group: dist.ProcessGroup | None = None) -> None:
        self._causal = CausalObjective(model, apart)
        self._group = group

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
        sums, counts = sum_parts(torch.stack([sums, counts]), self._group).unbind()
        return sums[:-1], counts[:-1]

    def by_reference(
        self, reference: Reference, batches: list[PreferenceBatch]
    ) -> list[PreferenceBatch]:
        """The micro-batches with the sums by the reference."""

        def compute(model: Any, part: PreferenceBatch) -> torch.Tensor:
            return self(model, part)[0]

        found = reference(batches, compute, lambda part: torch.zeros(part.count))
        return [replace(b, reference=sums) for b, sums in zip(batches, found, strict=True)]

    def loss(self, losses: torch.Tensor, batch: PreferenceBatch, **figures: torch.Tensor) -> Loss:
        """This rank's share of the loss from one term for each pair or single answer."""
        shares = shares_of(self._group)
        counts = torch.full_like(losses, 1 / shares)
        loss = sum_by_source(losses / shares, counts, batch.answer_sources, batch.source_count)
        sums = {name: value.detach().float().sum() / shares for name, value in figures.items()}
        return replace(loss, figures=sums)
