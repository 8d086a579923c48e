"""Next-token prediction: pretraining, and fine-tuning on what a mask lets through."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from shardwise.core.effective_device import effective_device, indices_where
from shardwise.data.loader import IGNORE, MicroBatch
from shardwise.nn.attention.document_mask import RowsMask
from shardwise.nn.objective import Loss, sum_by_source
from shardwise.objectives.head import HeadLoss, token_loss


class CausalObjective:
    """Next-token cross-entropy. `apart`: packed batches bring their documents; else the model sees positions alone.

    `head`: the model's head and the loss as one; without it the logits are made whole.
    """

    figures: tuple[str, ...] = ()
    of_tokens = True

    def __init__(self, model: Any, apart: bool = False, head: HeadLoss | None = None) -> None:
        self._apart, self._head = apart, head
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """What the model's forward takes."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if batch.position_ids is not None:
            inputs["position_ids"] = batch.position_ids
        if batch.attention_mask is not None:
            inputs["attention_mask"] = batch.attention_mask
        elif self._apart and batch.documents is not None:
            inputs["attention_mask"] = RowsMask(batch.documents)
        return inputs

    def logits(
        self, model: Any, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits, labels and sources of the positions that matter."""
        inputs, labels, sources = self.inputs(batch), batch.labels, batch.sources
        if self._keeps_some and effective_device(labels) == "cpu":
            # The head is a fifth of a small model's work; columns that no row learns from need no logits. On a GPU the
            # list of columns would be a host sync, so there all are computed.
            columns = indices_where((labels != IGNORE).any(0))
            if 0 < len(columns) < labels.shape[1]:
                inputs["logits_to_keep"], labels = columns, labels[:, columns]
                sources = None if sources is None else sources[:, columns]
        return model(**inputs).logits, labels, sources

    def __call__(self, model: Any, batch: MicroBatch) -> Loss:
        """Sum of -log p over the learned tokens of the micro-batch."""
        if self._head is not None:
            losses = self._head.losses(model, self.inputs(batch), batch.labels)
            return sum_by_source(
                losses, batch.labels.flatten() != IGNORE, batch.sources, batch.source_count
            )
        logits, labels, sources = self.logits(model, batch)
        return token_loss(logits, labels, sources, batch.source_count)
