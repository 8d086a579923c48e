"""Writing a target from a source: an encoder reads, a decoder predicts each token of the target from those before."""

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
        given = decoder_inputs(model, batch.labels)
        logits = model(**batch.inputs, decoder_input_ids=given, use_cache=False).logits
        return token_loss(
            logits, batch.labels, batch.sources_like(batch.labels), batch.source_count
        )


def decoder_inputs(model: Any, labels: torch.Tensor) -> torch.Tensor:
    """What the decoder is given while it predicts labels: the same, one place later, as the model itself shifts."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return torch.as_tensor(model.prepare_decoder_input_ids_from_labels(labels=labels))
    config = model.config
    given = labels.roll(1, dims=-1)
    given[:, 0] = config.decoder_start_token_id
    return given.masked_fill(given == IGNORE, config.pad_token_id)
