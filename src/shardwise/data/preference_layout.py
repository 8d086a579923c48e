"""Collates preference data into batches.

Every conversation is a document in a packed row (or has its own row), as in the causal layout; in addition the batch
has the conversation index of every position, so that log-probabilities can be summed per conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from shardwise.config.objectives import Purpose
from shardwise.data.layout import BatchLayout, CausalLayout, Reader
from shardwise.data.loader import MicroBatch
from shardwise.data.packing import DOCUMENT


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(MicroBatch):
    """Conversations and, for every position, the index of its conversation; padding has the index `count`.

    In pairs, 2i is chosen and 2i + 1 rejected. `wanted`: 1 or 0 for single answers. `answer_sources`: the source of
    each pair or single answer, None if there is only one. `reference`: each conversation's log-probability by the
    reference model, once that has been asked (zeros on pipeline stages that have no use for it).
    """

    conversations: torch.Tensor
    count: int
    wanted: torch.Tensor | None = None
    answer_sources: torch.Tensor | None = None
    reference: torch.Tensor | None = None


class _Conversations:
    """Reader that presents the conversations of documents as documents of their own."""

    def __init__(self, reader: Reader, rows: list[list[tuple[np.ndarray, int]]]) -> None:
        self.packing = reader.packing
        self._of = reader
        self.flat = [tokens for row in rows for tokens, _ in row]
        numbers = iter(range(len(self.flat)))
        places = [[(source, 0, next(numbers), len(tokens), 0) for tokens, source in row] for row in rows]
        self.sequences = [np.array(row, dtype=DOCUMENT) for row in places]

    @property
    def source_count(self) -> int:
        return self._of.source_count

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        return self.flat[index]


class _AnswersLayout:
    """Base class of the pair and single-answer layouts."""

    counted = True
    head = 1  # number of each document that is no token

    def __init__(self, pad_id: int) -> None:
        self._causal = CausalLayout(pad_id)

    def units(self, documents: np.ndarray) -> np.ndarray:
        """Pairs or single answers: one per document."""
        return np.ones(len(documents), dtype=np.int64)

    def parts(self, marked: np.ndarray) -> list[np.ndarray]:
        """Splits a document into its conversations."""
        raise NotImplementedError

    def collate(self, reader: Reader, sequences: Sequence[np.ndarray], epoch: int) -> PreferenceBatch:
        """Collates the conversations of each sequence into one row if packed, else one row each."""
        rows: list[list[tuple[np.ndarray, int]]] = []
        heads: list[int] = []
        sources: list[int] = []
        for documents in sequences:
            row: list[tuple[np.ndarray, int]] = []
            for source, chunk, index in documents[["source", "chunk", "index"]].tolist():
                marked = reader.marked(source, chunk, index)
                row += [(part, source) for part in self.parts(marked)]
                heads.append(int(marked[0]))
                sources.append(source)
            rows += [row] if reader.packing else [[part] for part in row]
        inner = _Conversations(reader, rows)
        laid_out = self._causal.collate(inner, inner.sequences, epoch)
        count = len(inner.flat)
        number = np.full(laid_out.input_ids.shape, count, dtype=np.int64)
        for line, places in zip(number, inner.sequences, strict=True):
            line[: int(places["length"].sum())] = np.repeat(places["index"], places["length"])
        return PreferenceBatch(
            **{f.name: getattr(laid_out, f.name) for f in fields(laid_out)},
            conversations=torch.from_numpy(number),
            count=count,
            wanted=torch.tensor(heads) if count == len(heads) else None,
            answer_sources=torch.tensor(sources) if reader.source_count > 1 else None,
        )


class PreferenceLayout(_AnswersLayout):
    """Pairs of a chosen and a rejected conversation, as DPO and ORPO take them."""

    def parts(self, marked: np.ndarray) -> list[np.ndarray]:
        """Returns the chosen and the rejected conversation."""
        first = 1 + int(marked[0])
        return [marked[1:first], marked[first:]]


class KtoLayout(_AnswersLayout):
    """Single conversations labelled desirable or not, as KTO takes them."""

    def parts(self, marked: np.ndarray) -> list[np.ndarray]:
        """Returns the document's single conversation."""
        return [marked[1:]]


LAYOUTS: dict[Purpose, Callable[[int], BatchLayout]] = {"preference": PreferenceLayout, "kto": KtoLayout}
