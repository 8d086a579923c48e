"""Groups of tokens that are balanced together: documents, or the micro-batch, without padding.

The loss of a group is weighted like its cross-entropy: by the tokens that are trained on.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.config.router import Balance
from shardwise.core.labels import IGNORE
from shardwise.data.preference_layout import PreferenceBatch
from shardwise.parallel.context.mask import ContextRows


class Tokens:
    """The tokens of the running forward, read by the hooks of routers and experts.

    One object serves all forwards: its tensors change, and are inputs of compiled blocks.
    """

    def __init__(self) -> None:
        # (tokens): each token's group; padding is in the last one.
        self.numbers: torch.Tensor | None = None
        # (groups + 1): units of the loss in each group, 0 for padding.
        self.weights: torch.Tensor | None = None

    @property
    def real(self) -> torch.Tensor | None:
        """(tokens): which ones are no padding; None if that is unknown."""
        if self.numbers is None or self.weights is None:
            return None
        return self.numbers < len(self.weights) - 1

    def set(self, numbers: torch.Tensor | None, weights: torch.Tensor | None) -> None:
        """Sets the tokens of the next forward."""
        self.numbers = numbers
        self.weights = weights


def grouped(batch: Any, balance: Balance) -> tuple[torch.Tensor, torch.Tensor]:
    """The group of each token and weight of each group, on the batch's device, without syncs."""
    numbers, groups = _documents(batch)
    if balance == "micro_batch":
        numbers = (numbers == groups).long()
        groups = 1
    weights = torch.zeros(groups + 1, device=numbers.device)
    if isinstance(batch, PreferenceBatch):  # a pair of conversations or a single one is one unit
        each = 1.0 if batch.wanted is not None else 0.5
        mask: Any = batch.attention_mask
        if isinstance(mask, ContextRows):  # ranks add their weights, and each has parts of all
            each /= mask.layout.ranks
        weights[:-1] = each * (batch.count if balance == "micro_batch" else 1)
    elif batch.labels.shape == batch.input_ids.shape:
        trained = (batch.labels != IGNORE).flatten().to(weights.dtype)
        weights.index_add_(0, numbers.flatten(), trained)
        weights[-1] = 0.0
    else:  # one class per row
        weights[:-1] = len(batch.labels) if balance == "micro_batch" else 1
    return numbers.flatten(), weights


def _documents(batch: Any) -> tuple[torch.Tensor, int]:
    """Each token's document, (rows, width), and their count, which is the number of padding."""
    if isinstance(batch, PreferenceBatch):
        return batch.conversations, batch.count
    rows, width = batch.input_ids.shape
    device = batch.input_ids.device
    mask = batch.attention_mask
    layout = mask.layout if isinstance(mask, ContextRows) else None
    documents = layout.on(device) if layout is not None else getattr(batch, "documents", None)
    columns = torch.arange(width, device=device).expand(rows, width)
    if documents is not None:
        count = len(documents.lengths)
        numbers = documents.index
        if layout is not None:
            full_columns = torch.arange(documents.width, device=device)
            columns = layout.take(full_columns.expand(rows, documents.width))
            numbers = layout.take(numbers)
    else:
        count = rows
        numbers = torch.arange(rows, device=device)[:, None].expand(rows, width)
    filled = getattr(batch, "filled", None)
    if filled is not None:
        return numbers.masked_fill(columns >= filled[:, None], count), count
    real = mask if layout is None else layout.take(layout.real.to(device, non_blocking=True))
    if isinstance(real, torch.Tensor) and real.ndim == 2:
        return numbers.masked_fill(real == 0, count), count
    return numbers, count
