"""Text classification."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.data.rows import RowBatch
from shardwise.nn.objective import Loss, sum_by_source
from shardwise.objectives.head import full_logits


class ClassifyObjective:
    """Cross-entropy over classes; `accuracy`: the share of texts whose likeliest class is right."""

    figures: tuple[str, ...] = ("accuracy",)
    of_tokens = False

    def __init__(self, model: Any) -> None:
        self._typed = "token_type_ids" in inspect.signature(model.forward).parameters

    def __call__(self, model: Any, batch: RowBatch) -> Loss:
        """Sum of -log p over the texts of the micro-batch."""
        if not self._typed:
            batch = replace(batch, token_type_ids=None)
        logits = full_logits(model(**batch.inputs).logits).float()
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        loss = sum_by_source(losses, torch.ones_like(losses), batch.sources, batch.source_count)
        right = (logits.detach().argmax(-1) == batch.labels).sum()
        return replace(loss, figures={"accuracy": right})
