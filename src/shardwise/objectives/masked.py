"""Filling in masked tokens; which ones are masked was decided when the batch was laid out (data/masking.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.data.rows import RowBatch
from shardwise.nn.objective import Loss
from shardwise.objectives.head import likeliest, token_loss


class MaskedObjective:
    """Cross-entropy over the masked tokens; `accuracy` is the share of them that the likeliest token is right for."""

    figures: tuple[str, ...] = ("accuracy",)
    of_tokens = True

    def __call__(self, model: Any, batch: RowBatch) -> Loss:
        """Sum of -log p over the masked tokens."""
        labels, logits = batch.labels, model(**batch.inputs).logits
        loss = token_loss(logits, labels, batch.sources_like(labels), batch.source_count)
        right = (
            likeliest(logits) == labels
        ).sum()  # what is not masked has a label that is no token
        return replace(loss, figures={"accuracy": right})
