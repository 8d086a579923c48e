"""Next-token prediction: pretraining, and fine-tuning on the tokens that a mask selects."""

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
    """Next-token cross-entropy.

    `apart`: packed batches are masked by document; otherwise the model gets only position ids.
    `head`: computes head and loss in one; without it, all logits of a batch are materialized.
    """

    figures: tuple[str, ...] = ()
    of_tokens = True

    def __init__(self, model: Any, apart: bool = False, head: HeadLoss | None = None) -> None:
        self._apart = apart
        self._head = head
        self._keeps_some = "logits_to_keep" in inspect.signature(model.forward).parameters

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """The keyword arguments of the model's forward."""
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
        """Logits, labels and sources, of at least the positions with a label."""
        inputs = self.inputs(batch)
        labels = batch.labels
        sources = batch.sources
        if self._keeps_some and effective_device(labels) == "cpu":
            # The head is a fifth of a small model's work; columns without any label need no logits.
            # On a GPU the list of columns would be a host sync, so there all are computed.
            columns = indices_where((labels != IGNORE).any(0))
            if 0 < len(columns) < labels.shape[1]:
                inputs["logits_to_keep"] = columns
                labels = labels[:, columns]
                if sources is not None:
                    sources = sources[:, columns]
        return model(**inputs).logits, labels, sources

    def __call__(self, model: Any, batch: MicroBatch) -> Loss:
        """Sum of -log p over the trained tokens of the micro-batch."""
        if self._head is not None:
            losses = self._head.losses(model, self.inputs(batch), batch.labels)
            trained = batch.labels.flatten() != IGNORE
            return sum_by_source(losses, trained, batch.sources, batch.source_count)
        logits, labels, sources = self.logits(model, batch)
        return token_loss(logits, labels, sources, batch.source_count)
