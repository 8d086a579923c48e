"""Serves the sequences of each step to each rank, identical for any number of ranks, from any position.

The order of sequences is a pure function of the seed and the sources ([Note: order] in mixing.py), so the only state is
the number of sequences consumed. Every rank knows the full step, hence the global number of loss tokens, without
communication. Seeking to a position repacks the windows before it: about 1.5 seconds per million documents.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch

from shardwise.config.schema import Data
from shardwise.core.errors import UserError
from shardwise.core.labels import IGNORE as IGNORE
from shardwise.data.documents import Documents
from shardwise.data.epochs import Epochs, micro_batches
from shardwise.data.layout import BatchLayout
from shardwise.data.mixing import Mixture, SourceStream, sequence_order
from shardwise.data.packing import DOCUMENT, Packed, pack

KEPT = 2  # windows that stay packed: a step can lie across two


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward: ids, labels already shifted (labels[t] is what position t predicts), positions or mask.

    `sources` is the source index of each position, out of `source_count`; None if there is only one. `counts`: False if
    these rows stand in for a rank that has none: their loss is multiplied by 0.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    sources: torch.Tensor | None = None
    source_count: int = 1
    documents: Documents | None = None  # of packed rows
    counts: bool = True
    filled: torch.Tensor | None = None  # tokens of each row; what comes behind them is padding

    def to(self, device: torch.device) -> Self:
        """Copy with all tensors on `device`."""
        moved: dict[str, Any] = {
            f.name: part.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(part := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **moved, documents=self.documents and self.documents.to(device))


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one rank in one step, and the counts over all ranks.

    `supervised` is the number of loss units (loss tokens, or whatever the layout counts), `by_source` those of each
    source; `sequences` is the number of sequences the step consumes.
    """

    micro_batches: list[Any]
    supervised: int
    tokens: int
    epoch: float
    by_source: tuple[int, ...] = ()
    sequences: int = 0


@dataclass(frozen=True)
class _Mark:
    """State at the beginning of a window: everything its documents depend on, and the totals before it."""

    epoch: int
    window: int  # within the epoch
    position: int  # of its first sequence in the run
    taken: tuple[int, ...]  # documents of each source, within the epoch
    carry: np.ndarray  # documents left over by the window before
    documents: int  # within the epoch
    tokens: int  # in the run


def make_loader(
    sources: Sequence[SourceStream],
    data: Data,
    seed: int,
    layout: BatchLayout,
    temperature: float,
    epochs: Epochs | None = None,
) -> Loader:
    """Builds a loader from the settings; evaluation, which does not mix sources, uses a temperature of 1."""
    packing = bool(data.packing)
    return Loader(sources, data.sequence_length, packing, data.packing_window, seed, layout, temperature, epochs)


class Loader:
    """Sequences of a mixture of sources in shuffled, packed order, epoch after epoch.

    `epochs`: steps end at epoch boundaries (see [Note: epochs]); None if steps are always full.
    """

    def __init__(
        self,
        sources: Sequence[SourceStream],
        sequence_length: int,
        packing: bool,
        window: int,
        seed: int,
        layout: BatchLayout,
        temperature: float = 1.0,
        epochs: Epochs | None = None,
    ) -> None:
        self.epochs = epochs
        self.sources = tuple(sources)
        self.layout = layout
        self.seed = seed
        self.sequence_length, self.packing = sequence_length, packing
        self._head = getattr(layout, "head", 0)  # of each document, in its length and no token
        self._stop = threading.Event()
        self._mixture = Mixture(self.sources, window, seed, temperature, self._stop)
        self._marks = [_Mark(0, 0, 0, self._mixture.start, np.empty(0, dtype=DOCUMENT), 0, 0)]
        self._epochs = [0]  # the first mark of each epoch
        self._packed: OrderedDict[int, Packed] = OrderedDict()

    @property
    def names(self) -> list[str]:
        """Names of the sources, in order."""
        return [s.name for s in self.sources]

    def close(self) -> None:
        """Releases threads that wait for a chunk; the loader cannot be used afterwards."""
        self._stop.set()

    def epoch_sequences(self, epoch: int = 0) -> int:
        """Number of sequences in an epoch (packing makes epochs differ by a few); waits for all sources."""
        first, after = self._epoch_marks(epoch)
        return after.position - first.position

    def efficiency(self, epoch: int = 0) -> float:
        """Fraction of an epoch's positions that is not padding, if all sequences were `sequence_length` long."""
        first, after = self._epoch_marks(epoch)
        return (after.tokens - first.tokens) / max(1, (after.position - first.position) * self.sequence_length)

    def sequence(self, index: int) -> np.ndarray:
        """Documents of the sequence at an index of the first epoch, the only one evaluation reads."""
        return self.sequences(index, 1)[0]

    def locate(self, position: int) -> tuple[int, int]:
        """Epoch, and index within it, of the sequence at a global position."""
        epoch = self._marks[self._window_of(position)].epoch
        return epoch, position - self._marks[self._epochs[epoch]].position

    def sequences(self, position: int, count: int) -> list[np.ndarray]:
        """`count` sequences from a global position on, across epochs, each as documents."""
        result: list[np.ndarray] = []
        while len(result) < count:
            number = self._window_of(position + len(result))
            packed = self._window(number)
            offset = position + len(result) - self._marks[number].position
            result += [packed[i] for i in range(offset, min(len(packed), offset + count - len(result)))]
        return result

    def document(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and loss mask of a document of a sequence."""
        return self.sources[place["source"]].store.document(int(place["chunk"]), int(place["index"]))

    def step(self, position: int, batch_size: int, micro: int, rank: int, ranks: int) -> StepBatch:
        """Returns the step of `rank` for the global batch that begins at `position`."""
        count = batch_size if self.epochs is None else min(batch_size, self.epochs.left(position))
        assert count, f"the run has ended before sequence {position}"
        sequences = self.sequences(position, count)
        documents = np.concatenate(sequences, dtype=DOCUMENT)
        units = self.layout.units(documents)
        by_source = np.bincount(documents["source"], weights=units, minlength=len(self.sources))
        epoch = self.locate(position)[0]
        assert self.epochs is None or self.locate(position + count - 1)[0] == epoch, "a step straddles two epochs"
        local = [sequences[span.start : span.stop] for span in micro_batches(count, micro, rank, ranks)]
        return StepBatch(
            [self.collate(rows, epoch) if rows else self._stand_in(sequences, epoch) for rows in local],
            int(units.sum()),
            int(documents["length"].sum()) - self._head * len(documents),
            self._progress(position + count),
            tuple(int(n) for n in by_source),
            count,
        )

    def _stand_in(self, sequences: Sequence[np.ndarray], epoch: int) -> Any:
        """Batch for a rank without rows, since forwards are collective: the step's shortest row, with zero weight."""
        shortest = min(sequences, key=lambda documents: int(documents["length"].sum()))
        return replace(self.collate([shortest], epoch), counts=False)

    @property
    def source_count(self) -> int:
        """Number of sources."""
        return len(self.sources)

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        """Tokens of a document, with LEARNED set in loss tokens."""
        return self.sources[source].store.marked(chunk, index)

    def collate(self, sequences: Sequence[np.ndarray], epoch: int = 0) -> Any:
        """Collates sequences of documents into model inputs."""
        return self.layout.collate(self, sequences, epoch)

    def _epoch_marks(self, epoch: int) -> tuple[_Mark, _Mark]:
        """Marks at the beginning of an epoch and of the next one."""
        while len(self._epochs) <= epoch + 1:
            self._advance()
        return self._marks[self._epochs[epoch]], self._marks[self._epochs[epoch + 1]]

    def _window_of(self, position: int) -> int:
        """Index of the window that contains a position; packs windows up to it."""
        while self._marks[-1].position <= position:
            self._advance()
        return bisect_right(self._marks, position, key=lambda mark: mark.position) - 1

    def _advance(self) -> None:
        """Packs the next window of the run and records the mark behind it."""
        number = len(self._marks) - 1
        mark = self._marks[-1]
        packed, consumed, carry, ended = self._pack(mark)
        self._keep(number, packed)
        tokens = mark.tokens + int(packed.documents["length"].sum()) - self._head * len(packed.documents)
        position, documents = mark.position + len(packed), mark.documents + len(packed.documents)
        if not ended:
            self._marks.append(_Mark(mark.epoch, mark.window + 1, position, consumed, carry, documents, tokens))
            return
        if not position and self._mixture.documents(0) < 1:
            names = ", ".join(self.names)
            problem = "there is not one document for an epoch of the run"
            raise UserError("data.train", names, problem, "check the files, data.refine and the sources' epochs")
        self._marks.append(_Mark(mark.epoch + 1, 0, position, self._mixture.start, carry, 0, tokens))
        self._epochs.append(len(self._marks) - 1)

    def _window(self, number: int) -> Packed:
        """The packed window of this index, whose mark must be known."""
        if number not in self._packed:
            self._keep(number, self._pack(self._marks[number])[0])
        return self._packed[number]

    def _keep(self, number: int, packed: Packed) -> None:
        self._packed[number] = packed
        while len(self._packed) > KEPT:
            self._packed.popitem(last=False)

    def _pack(self, mark: _Mark) -> tuple[Packed, tuple[int, ...], np.ndarray, bool]:
        documents, consumed, ended = self._mixture.window(mark.epoch, mark.taken)
        rng = sequence_order(self.seed, mark.epoch, mark.window)
        pool = np.concatenate([mark.carry, documents])
        packed, carry = pack(pool, self.sequence_length + self._head, self.packing, rng, last=ended)
        return packed, consumed, carry, ended

    def _progress(self, position: int) -> float:
        """Epochs completed, counted in documents; estimated where a source is not complete yet."""
        number = bisect_right(self._marks, position, key=lambda mark: mark.position) - 1
        mark = self._marks[number]
        documents = float(mark.documents)
        if number + 1 < len(self._marks):
            packed = self._window(number)
            documents += len(packed.documents) * (position - mark.position) / len(packed)
        total = self._mixture.documents(mark.epoch)
        return mark.epoch + (min(1.0, documents / total) if total else 0.0)
