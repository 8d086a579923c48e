"""Masked language modelling; data/masking.py selects the masked tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.data.rows import RowBatch
from shardwise.nn.objective import Loss
from shardwise.objectives.head import likeliest, token_loss


class MaskedObjective:
    """Cross-entropy over masked tokens; `accuracy`: the share whose likeliest token is right."""

    figures: tuple[str, ...] = ("accuracy",)
    of_tokens = True

    def __call__(self, model: Any, batch: RowBatch) -> Loss:
        """Sum of -log p over the masked tokens."""
        labels = batch.labels
        logits = model(**batch.inputs).logits
        loss = token_loss(logits, labels, batch.sources_like(labels), batch.source_count)
        right = (likeliest(logits) == labels).sum()  # labels of unmasked tokens match no token
        return replace(loss, figures={"accuracy": right})
