"""Collates documents into model inputs.

A document is tokens with a loss mask. Objectives that need more than that encode it in the tokens themselves:

purpose     a document's tokens
causal      the text; loss tokens are marked
seq2seq     source, then target; the target is marked
masked      the text, all of it marked; which tokens are masked is decided here
classify    the text, then the class as if it were a token, marked
preference  the length of the chosen conversation, then both conversations, chosen first; the answers are marked
kto         0 or 1 (desirable), then the conversation; the answer is marked
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from shardwise.core.labels import IGNORE
from shardwise.data.documents import Documents
from shardwise.data.packing import DOCUMENT
from shardwise.data.store import LEARNED

if TYPE_CHECKING:
    from shardwise.data.loader import MicroBatch


class Reader(Protocol):
    """Access to a document's tokens; `LEARNED` is set in loss tokens."""

    packing: bool

    @property
    def source_count(self) -> int: ...

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray: ...


class BatchLayout(Protocol):
    """Collates sequences (arrays of DOCUMENT) into micro-batches, and counts the loss units of documents.

    `epoch` seeds layouts that sample at random; `counted`: whether `units` is exact, or known from the batch alone.
    """

    counted: bool

    def units(self, documents: np.ndarray) -> np.ndarray: ...

    def collate(self, reader: Reader, sequences: Sequence[np.ndarray], epoch: int) -> Any: ...


class CausalLayout:
    """Rows of documents, packed or one per row, for next-token prediction."""

    counted = True

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def units(self, documents: np.ndarray) -> np.ndarray:
        """Number of loss tokens of each document."""
        assert documents.dtype == DOCUMENT
        return documents["supervised"]

    def collate(self, reader: Reader, sequences: Sequence[np.ndarray], epoch: int) -> MicroBatch:
        """Collates sequences into rows, padded to the longest row of this micro-batch."""
        from shardwise.data.loader import MicroBatch

        width = max(int(s["length"].sum()) for s in sequences)
        shape = (len(sequences), width)
        marked = np.full(shape, self.pad_id, dtype=np.uint32)
        real = np.zeros(shape, dtype=np.int64)
        positions = np.broadcast_to(np.arange(width), shape).copy()
        sources = np.zeros(shape, dtype=np.int64)
        for row, documents in enumerate(sequences):
            ends = np.cumsum(documents["length"])
            begins = ends - documents["length"]
            filled = int(ends[-1])
            places = zip(*(documents[n].tolist() for n in ("source", "chunk", "index")), begins, ends, strict=True)
            for source, chunk, index, begin, end in places:
                marked[row, begin:end] = reader.marked(source, chunk, index)
            positions[row, :filled] -= np.repeat(begins, documents["length"])
            # Padding is one more document: its positions restart, so nothing real sees it and it sees nothing real.
            positions[row, filled:] -= filled
            if reader.packing:
                # Of the row's own tokens: the vector of `pad_id` may be zero, and alone in its document it stays zero,
                # where gradients of square roots (Gemma 3n's deviations) are none.
                marked[row, filled:] = marked[row, 0] & ~LEARNED
            sources[row, :filled] = np.repeat(documents["source"], documents["length"])
            real[row, :filled] = 1
        ids = (marked & ~LEARNED).astype(np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        # The first token of a document is never learned (write_chunk sees to it), so no label crosses into the next.
        labels[:, :-1] = np.where(marked[:, 1:] >= LEARNED, ids[:, 1:], IGNORE)
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions) if reader.packing else None,
            attention_mask=None if reader.packing else torch.from_numpy(real),
            sources=torch.from_numpy(sources) if reader.source_count > 1 else None,
            source_count=reader.source_count,
            documents=Documents.of_positions(positions) if reader.packing else None,
            filled=torch.from_numpy(real.sum(1)),
        )
