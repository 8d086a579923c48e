"""How judged answers become batches.

Every conversation is a document of its own in a packed row (or a row of its own), by the machinery of causal rows;
beside it the batch says which conversation a position belongs to, so that log-probabilities can be added up.
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
    """Conversations and, for every position, the number of the one it is in; padding has the number `count`.

    Of pairs 2i is chosen and 2i + 1 rejected. `wanted`: of single answers, 1 or 0. `answer_sources`: the source of
    each pair or single answer, None where there is but one.
    """

    conversations: torch.Tensor
    count: int
    wanted: torch.Tensor | None = None
    answer_sources: torch.Tensor | None = None


class _Conversations:
    """A reader of the conversations of documents as if each were a document of its own."""

    def __init__(self, reader: Reader, rows: list[list[tuple[np.ndarray, int]]]) -> None:
        self.packing, self._of = reader.packing, reader
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
    """What pairs and single answers have in common."""

    counted = True
    head = 1  # number of each document that is no token

    def __init__(self, pad_id: int) -> None:
        self._causal = CausalLayout(pad_id)

    def units(self, documents: np.ndarray) -> np.ndarray:
        """Pairs, or single answers: one a document."""
        return np.ones(len(documents), dtype=np.int64)

    def parts(self, marked: np.ndarray) -> list[np.ndarray]:
        """The conversations of a document."""
        raise NotImplementedError

    def collate(self, reader: Reader, sequences: Sequence[np.ndarray], epoch: int) -> PreferenceBatch:
        """Lays the conversations of each sequence out in one row if packed, else each in its own."""
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
    """Pairs of a chosen and a rejected conversation."""

    def parts(self, marked: np.ndarray) -> list[np.ndarray]:
        """Chosen, rejected."""
        first = 1 + int(marked[0])
        return [marked[1:first], marked[first:]]


class KtoLayout(_AnswersLayout):
    """Conversations whose answers are wanted or not."""

    def parts(self, marked: np.ndarray) -> list[np.ndarray]:
        """The one there is."""
        return [marked[1:]]


LAYOUTS: dict[Purpose, Callable[[int], BatchLayout]] = {"preference": PreferenceLayout, "kto": KtoLayout}
