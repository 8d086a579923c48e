"""Which columns of a batch each rank holds, and what is known of them on the host before anything is computed.

A row is cut into twice as many chunks as there are ranks. In zigzag order rank r holds chunks r and 2n-1-r: under a
causal mask early tokens have little to look at and late ones much, and so all ranks have the same. In straight order
rank r holds chunks 2r and 2r+1, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.core.errors import UserError
from shardwise.core.labels import IGNORE
from shardwise.data.documents import Documents
from shardwise.data.loader import MicroBatch
from shardwise.data.rows import RowBatch
from shardwise.nn.attention.document_mask import RowsMask
from shardwise.nn.tiny.case import CannotParallelize

Batch = TypeVar("Batch", MicroBatch, RowBatch)


def chunks_of(ranks: int, rank: int, zigzag: bool) -> tuple[int, int]:
    """The chunks of a rank, in the order of the row."""
    return (rank, 2 * ranks - 1 - rank) if zigzag else (2 * rank, 2 * rank + 1)


def take_columns(
    whole: torch.Tensor, ranks: int, rank: int, zigzag: bool, dim: int
) -> torch.Tensor:
    """A rank's part, along a dimension, of something that has all columns."""
    chunk = whole.shape[dim] // (2 * ranks)
    return torch.cat(
        [whole.narrow(dim, c * chunk, chunk) for c in chunks_of(ranks, rank, zigzag)], dim
    )


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """The documents of whole rows (padding is one more, at the end) and the part of them that a rank holds."""

    documents: Documents
    real: torch.Tensor  # (rows, width) bool on the host: no padding
    ranks: int
    rank: int
    zigzag: bool
    _moved: dict[torch.device, Documents] = field(default_factory=dict)

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

    def take(self, whole: torch.Tensor, rank: int | None = None, dim: int = 1) -> torch.Tensor:
        """A rank's columns of something that has them all; this rank's if none is named."""
        return take_columns(
            whole, self.ranks, self.rank if rank is None else rank, self.zigzag, dim
        )

    @property
    def packed(self) -> bool:
        """Whether a row holds more than a document and padding."""
        return len(self.documents.lengths) > int((~self.real).any(1).sum()) + self.rows

    def on(self, device: torch.device) -> Documents:
        """The documents with what is computed from them on a device."""
        if device not in self._moved:
            self._moved[device] = self.documents.to(device)
        return self._moved[device]

    @cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the first and the last document in each chunk, (rows, chunks): numbers go up along a row."""
        lengths = np.asarray(self.documents.lengths)
        index = np.repeat(np.arange(len(lengths)), lengths).reshape(self.rows, -1)
        return index[:, :: self.chunk], index[:, self.chunk - 1 :: self.chunk]

    def share(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> bool:
        """Whether a document has tokens in chunks of both kinds."""
        first, last = self._ends
        pairs = ((q, k) for q in queries for k in keys)
        return any(
            ((first[:, k] <= last[:, q]) & (first[:, q] <= last[:, k])).any() for q, k in pairs
        )

    def one_document(self, chunks: tuple[int, ...]) -> bool:
        """Whether chunks hold nothing but one document in every row."""
        first, last = self._ends
        low, high = first[:, list(chunks)].min(1), last[:, list(chunks)].max(1)
        return bool((low == high).all())


def split_batch(batch: Batch, ranks: int, rank: int, zigzag: bool) -> tuple[Batch, SequenceLayout]:
    """A rank's columns of a batch, and the layout; the mask and the documents are the layout's to tell."""
    missing = -batch.input_ids.shape[1] % (2 * ranks)
    layout = layout_of(batch, ranks, rank, zigzag, missing)
    if batch.labels.shape != batch.input_ids.shape:
        raise CannotParallelize(
            "", "labels that are not one per token are not divided with the tokens"
        )

    def part(whole: torch.Tensor | None, fill: int = 0) -> Any:
        if whole is None or whole.shape != batch.input_ids.shape:  # the source of a row
            return whole
        return layout.take(F.pad(whole, (0, missing), value=fill))

    changes: dict[str, Any] = {
        "input_ids": part(batch.input_ids),
        "labels": part(batch.labels, IGNORE),
        "position_ids": layout.take(layout.on(batch.input_ids.device).positions),
        "sources": part(batch.sources),
    }
    if isinstance(batch, RowBatch):
        return replace(batch, token_type_ids=part(batch.token_type_ids), **changes), layout
    return replace(batch, attention_mask=None, documents=None, **changes), layout


def layout_of(
    batch: MicroBatch | RowBatch, ranks: int, rank: int, zigzag: bool, missing: int = 0
) -> SequenceLayout:
    """The documents of a batch, `missing` columns of padding added."""
    rows, width = batch.input_ids.shape
    mask: Any = batch.attention_mask
    documents = mask.documents if isinstance(mask, RowsMask) else getattr(batch, "documents", None)
    real = torch.ones(rows, width + missing, dtype=torch.bool)
    real[:, width:] = False
    if documents is not None:
        lengths = _rows_of(documents)
    elif mask is not None:
        if mask.ndim != 2:
            raise CannotParallelize(
                "", f"a mask of shape {tuple(mask.shape)} is not divided with the tokens"
            )
        real[:, :width] = mask.cpu() != 0
        if (real[:, 1:] & ~real[:, :-1]).any():
            remedy = "pad at the end of the rows (padding_side: right)"
            raise UserError("attention_mask", None, "padding is not at the end of the rows", remedy)
        lengths = [[n, width + missing - n] for n in real.sum(1).tolist()]
    elif batch.position_ids is not None:
        lengths = _rows_of(Documents.of_positions(batch.position_ids.cpu()))
    else:
        lengths = [[width]] * rows
    lengths = [[n for n in (*row, width + missing - sum(row)) if n] for row in lengths]
    return SequenceLayout(Documents.of_lengths(lengths), real, ranks, rank, zigzag)


def _rows_of(documents: Documents) -> list[list[int]]:
    """Lengths row by row."""
    found: list[list[int]] = [[]]
    for length in documents.lengths:
        if sum(found[-1]) == documents.width:
            found.append([])
        found[-1].append(length)
    return found
