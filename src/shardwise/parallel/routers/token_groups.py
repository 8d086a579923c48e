"""Which group of tokens each token of a micro-batch is balanced in: its document, or the micro-batch; padding in none.

The loss of a group is weighed as its cross-entropy is: by the tokens that are trained on.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.config.router import Balance
from shardwise.core.labels import IGNORE
from shardwise.data.preference_layout import PreferenceBatch
from shardwise.parallel.context.mask import ContextRows


class Tokens:
    """The tokens of the forward that is running, as the hooks of routers and experts read them.

    One object for all forwards, whose tensors change: a compiled block takes them as inputs.
    """

    def __init__(self) -> None:
        self.numbers: torch.Tensor | None = (
            None  # (tokens): each one's group; that of padding is the last
        )
        self.weights: torch.Tensor | None = (
            None  # (groups + 1): units of the loss in each, 0 for padding
        )

    @property
    def real(self) -> torch.Tensor | None:
        """(tokens): what is no padding; None where nothing is known of it."""
        return (
            None
            if self.numbers is None or self.weights is None
            else self.numbers < len(self.weights) - 1
        )

    def set(self, numbers: torch.Tensor | None, weights: torch.Tensor | None) -> None:
        """Moves on to another forward."""
        self.numbers, self.weights = numbers, weights


def grouped(batch: Any, balance: Balance) -> tuple[torch.Tensor, torch.Tensor]:
    """Group of each token and weight of each group, on the batch's device; never waits for it."""
    numbers, groups = _documents(batch)
    if balance == "micro_batch":
        numbers, groups = (numbers == groups).long(), 1
    weights = torch.zeros(groups + 1, device=numbers.device)
    if isinstance(
        batch, PreferenceBatch
    ):  # a pair of conversations is one unit, and so is a single one
        each = 1.0 if batch.wanted is not None else 0.5
        weights[:-1] = each * (batch.count if balance == "micro_batch" else 1)
    elif batch.labels.shape == batch.input_ids.shape:
        weights.index_add_(
            0, numbers.flatten(), (batch.labels != IGNORE).flatten().to(weights.dtype)
        )
        weights[-1] = 0.0
    else:  # one class a row
        weights[:-1] = len(batch.labels) if balance == "micro_batch" else 1
    return numbers.flatten(), weights


def _documents(batch: Any) -> tuple[torch.Tensor, int]:
    """The number of each token's document, (rows, width), and how many there are, which is the number of padding."""
    if isinstance(batch, PreferenceBatch):
        return batch.conversations, batch.count
    rows, width = batch.input_ids.shape
    device, mask = batch.input_ids.device, batch.attention_mask
    layout = mask.layout if isinstance(mask, ContextRows) else None
    documents = layout.on(device) if layout is not None else getattr(batch, "documents", None)
    columns = torch.arange(width, device=device).expand(rows, width)
    if documents is not None:
        count, numbers = len(documents.lengths), documents.index
        if layout is not None:
            whole = torch.arange(documents.width, device=device).expand(rows, documents.width)
            numbers, columns = layout.take(numbers), layout.take(whole)
    else:
        count, numbers = rows, torch.arange(rows, device=device)[:, None].expand(rows, width)
    if (filled := getattr(batch, "filled", None)) is not None:
        return numbers.masked_fill(columns >= filled[:, None], count), count
    real = mask if layout is None else layout.take(layout.real.to(device, non_blocking=True))
    if isinstance(real, torch.Tensor) and real.ndim == 2:
        return numbers.masked_fill(real == 0, count), count
    return numbers, count
