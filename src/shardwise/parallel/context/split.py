"""Which columns of a batch each rank holds, and what the host knows about them in advance.

A row is cut into twice as many chunks as there are ranks. In zigzag order, rank r holds chunks r
and 2n-1-r: under a causal mask early tokens attend to few keys and late tokens to many, so this
balances the work. In straight order, rank r holds the adjacent chunks 2r and 2r+1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.core.effective_device import indices_where
from shardwise.core.errors import UserError
from shardwise.core.labels import IGNORE
from shardwise.data.distillation_batch import DistillationBatch
from shardwise.data.documents import Documents
from shardwise.data.loader import MicroBatch
from shardwise.data.preference_layout import PreferenceBatch
from shardwise.data.rows import RowBatch
from shardwise.nn.attention.document_mask import RowsMask
from shardwise.nn.tiny.case import CannotParallelize

Batch = TypeVar("Batch", MicroBatch, RowBatch)


def chunks_of(ranks: int, rank: int, zigzag: bool) -> tuple[int, int]:
    """The chunks of a rank, in the order of the row."""
    if zigzag:
        return rank, 2 * ranks - 1 - rank
    return 2 * rank, 2 * rank + 1


def take_columns(full: torch.Tensor, ranks: int, rank: int, zigzag: bool, dim: int) -> torch.Tensor:
    """A rank's part, along a dimension, of a tensor with all columns."""
    size = full.shape[dim] // (2 * ranks)
    first, second = chunks_of(ranks, rank, zigzag)
    return torch.cat(
        [full.narrow(dim, first * size, size), full.narrow(dim, second * size, size)], dim
    )


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The documents of full rows (padding is one more, at the end) and the part a rank holds."""

    documents: Documents
    real: torch.Tensor  # (rows, width) bool on the host: no padding
    ranks: int
    rank: int
    zigzag: bool
    _on_device: dict[torch.device, Documents] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.documents.rows

    @property
    def width(self) -> int:
        """Columns that a rank holds."""
        return self.documents.width // self.ranks

    @property
    def chunk(self) -> int:
        return self.width // 2

    def chunks(self, rank: int) -> tuple[int, int]:
        """The chunks of a rank, in the order of the row."""
        return chunks_of(self.ranks, rank, self.zigzag)

    def take(self, full: torch.Tensor, rank: int | None = None, dim: int = 1) -> torch.Tensor:
        """The columns of a rank (default: this one) of a tensor with all columns."""
        if rank is None:
            rank = self.rank
        return take_columns(full, self.ranks, rank, self.zigzag, dim)

    @property
    def packed(self) -> bool:
        """Whether a row holds more than a document and padding."""
        return len(self.documents.lengths) > int((~self.real).any(1).sum()) + self.rows

    def on(self, device: torch.device) -> Documents:
        """The documents, with their derived tensors on a device (cached)."""
        if device not in self._on_device:
            self._on_device[device] = self.documents.to(device)
        return self._on_device[device]

    @cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the first and last document in each chunk, (rows, chunks); they ascend."""
        lengths = np.asarray(self.documents.lengths)
        index = np.repeat(np.arange(len(lengths)), lengths).reshape(self.rows, -1)
        return index[:, :: self.chunk], index[:, self.chunk - 1 :: self.chunk]

    def share(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> bool:
        """Whether a document has tokens in chunks of both kinds."""
        first, last = self._ends
        for q in queries:
            for k in keys:
                overlap = (first[:, k] <= last[:, q]) & (first[:, q] <= last[:, k])
                if overlap.any():
                    return True
        return False

    def one_document(self, chunks: tuple[int, ...]) -> bool:
        """Whether these chunks hold a single document in every row."""
        first, last = self._ends
        lowest = first[:, list(chunks)].min(1)
        highest = last[:, list(chunks)].max(1)
        return bool((lowest == highest).all())


def split_batch(batch: Batch, ranks: int, rank: int, zigzag: bool) -> tuple[Batch, SequenceLayout]:
    """A rank's columns of a batch, and the layout, which replaces its mask and documents."""
    missing = -batch.input_ids.shape[1] % (2 * ranks)
    layout = layout_of(batch, ranks, rank, zigzag, missing)
    if batch.labels.shape != batch.input_ids.shape:
        raise CannotParallelize(
            "", "labels that are not one per token are not divided with the tokens"
        )

    def local_part(full: torch.Tensor | None, fill: int = 0) -> Any:
        if full is None or full.shape != batch.input_ids.shape:  # the source of a row
            return full
        return layout.take(F.pad(full, (0, missing), value=fill))

    changes: dict[str, Any] = {
        "input_ids": local_part(batch.input_ids),
        "labels": local_part(batch.labels, IGNORE),
        "position_ids": layout.take(layout.on(batch.input_ids.device).positions),
        "sources": local_part(batch.sources),
    }
    if isinstance(batch, PreferenceBatch):
        changes["conversations"] = local_part(batch.conversations, batch.count)
    if isinstance(batch, DistillationBatch):
        changes |= _local_places(batch, lambda full: local_part(full, -1))
    if isinstance(batch, RowBatch):
        changes["token_type_ids"] = local_part(batch.token_type_ids)
        return replace(batch, **changes), layout
    return replace(batch, attention_mask=None, documents=None, **changes), layout


def _local_places(
    batch: DistillationBatch, local_part: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The places that a rank has, as numbers of its own rows, and stored answers about them."""
    numbers = torch.full_like(batch.labels, -1).flatten()
    numbers[batch.places] = torch.arange(len(batch.places), device=numbers.device)
    local = local_part(numbers.view(batch.labels.shape)).flatten()
    places = indices_where(local >= 0)
    changes = {"places": places}
    if batch.likeliest is not None and batch.log_probs is not None:
        changes["likeliest"] = batch.likeliest[local[places]]
        changes["log_probs"] = batch.log_probs[local[places]]
    return changes


def layout_of(
    batch: MicroBatch | RowBatch, ranks: int, rank: int, zigzag: bool, missing: int = 0
) -> SequenceLayout:
    """The layout of a batch that is padded by `missing` more columns."""
    rows, width = batch.input_ids.shape
    padded_width = width + missing
    mask: Any = batch.attention_mask
    documents = mask.documents if isinstance(mask, RowsMask) else getattr(batch, "documents", None)
    real = torch.ones(rows, padded_width, dtype=torch.bool)
    real[:, width:] = False
    if documents is not None:
        lengths = _lengths_by_row(documents)
    elif mask is not None:
        if mask.ndim != 2:
            raise CannotParallelize(
                "", f"a mask of shape {tuple(mask.shape)} is not divided with the tokens"
            )
        real[:, :width] = mask.cpu() != 0
        if (real[:, 1:] & ~real[:, :-1]).any():
            remedy = "pad at the end of the rows (padding_side: right)"
            raise UserError("attention_mask", None, "padding is not at the end of the rows", remedy)
        lengths = [[tokens, padded_width - tokens] for tokens in real.sum(1).tolist()]
    elif batch.position_ids is not None:
        lengths = _lengths_by_row(Documents.of_positions(batch.position_ids.cpu()))
    else:
        lengths = [[width]] * rows
    filled = []
    for row in lengths:
        with_padding = (*row, padded_width - sum(row))
        filled.append([length for length in with_padding if length])
    return SequenceLayout(Documents.of_lengths(filled), real, ranks, rank, zigzag)


def _lengths_by_row(documents: Documents) -> list[list[int]]:
    rows: list[list[int]] = [[]]
    for length in documents.lengths:
        if sum(rows[-1]) == documents.width:
            rows.append([])
        rows[-1].append(length)
    return rows
