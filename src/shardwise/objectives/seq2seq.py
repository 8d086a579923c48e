"""Sequence to sequence: an encoder reads a source, a decoder predicts the target."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.labels import IGNORE
from shardwise.data.rows import RowBatch
from shardwise.nn.objective import Loss
from shardwise.objectives.head import token_loss


class Seq2seqObjective:
    """Cross-entropy over the target's tokens."""

    figures: tuple[str, ...] = ()
    of_tokens = True

    def __call__(self, model: Any, batch: RowBatch) -> Loss:
        """Sum of -log p over the tokens of the targets."""
        labels = batch.labels
        inputs = decoder_inputs(model, labels)
        logits = model(**batch.inputs, decoder_input_ids=inputs, use_cache=False).logits
        return token_loss(logits, labels, batch.sources_like(labels), batch.source_count)


def decoder_inputs(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """The decoder's inputs for these labels: shifted right by one, by the model's own function."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return torch.as_tensor(model.prepare_decoder_input_ids_from_labels(labels=labels))
    config = model.config
    inputs = labels.roll(1, dims=-1)
    inputs[:, 0] = config.decoder_start_token_id
    return inputs.masked_fill(inputs == IGNORE, config.pad_token_id)
