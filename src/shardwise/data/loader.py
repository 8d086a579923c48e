"""Serves each step's sequences to each rank, the same on any number of ranks, from any position.

The order of sequences is a pure function of the seed and the sources ([Note: order] in mixing.py), so the only state is
how many have been consumed. Every rank knows the whole step, hence the global number of learned tokens, without asking
the others. To find a position the windows before it are packed again: about 1.5 seconds per million documents.
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

    `sources` tells which of `source_count` sources each position is from; None where there is but one. `counts`: False
    where a rank has no rows, and these take part in its place: their loss is multiplied by 0.
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
        """The same on a device."""
        moved: dict[str, Any] = {
            f.name: part.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(part := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **moved, documents=self.documents and self.documents.to(device))


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one step, and the counts over all ranks.

    `supervised` are units of the loss (learned tokens, or what else the layout counts), `by_source` those of each
    source; `sequences` are consumed by the step.
    """

    micro_batches: list[Any]
    supervised: int
    tokens: int
    epoch: float
    by_source: tuple[int, ...] = ()
    sequences: int = 0


@dataclass(frozen=True)
class _Mark:
    """Where a window begins: all that its documents follow from, and what came before it."""

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
    """A loader as the settings want it; evaluation, which mixes nothing, has a temperature of 1."""
    packing = bool(data.packing)
    return Loader(sources, data.sequence_length, packing, data.packing_window, seed, layout, temperature, epochs)


class Loader:
    """Sequences of a mixture of sources in shuffled, packed order, epoch after epoch.

    `epochs`: no step takes more than is left of its epoch (see [Note: epochs]); None where steps are always full.
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
        self.sources, self.layout, self.seed = tuple(sources), layout, seed
        self.sequence_length, self.packing = sequence_length, packing
        self._head = getattr(layout, "head", 0)  # of each document, in its length and no token
        self._stop = threading.Event()
        self._mixture = Mixture(self.sources, window, seed, temperature, self._stop)
        self._marks = [_Mark(0, 0, 0, self._mixture.start, np.empty(0, dtype=DOCUMENT), 0, 0)]
        self._epochs = [0]  # the first mark of each epoch
        self._packed: OrderedDict[int, Packed] = OrderedDict()

    @property
    def names(self) -> list[str]:
        """The sources' names, in their order."""
        return [s.name for s in self.sources]

    def close(self) -> None:
        """Lets go of whoever waits for a chunk; the loader is of no use afterwards."""
        self._stop.set()

    def epoch_sequences(self, epoch: int = 0) -> int:
        """How many sequences an epoch has (packing makes epochs differ by a few); waits for the whole sources."""
        first, after = self._epoch_marks(epoch)
        return after.position - first.position

    def efficiency(self, epoch: int = 0) -> float:
        """Which share of an epoch's sequences is no padding, were all of them `sequence_length` long."""
        first, after = self._epoch_marks(epoch)
        return (after.tokens - first.tokens) / max(1, (after.position - first.position) * self.sequence_length)

    def sequence(self, index: int) -> np.ndarray:
        """Documents of the sequence at an index of the first epoch (evaluation reads just that one)."""
        return self.sequences(index, 1)[0]

    def locate(self, position: int) -> tuple[int, int]:
        """Epoch and index within it of the sequence at a global position."""
        epoch = self._marks[self._window_of(position)].epoch
        return epoch, position - self._marks[self._epochs[epoch]].position

    def sequences(self, position: int, count: int) -> list[np.ndarray]:
        """`count` sequences from a global position on, across epochs, each as documents."""
        found: list[np.ndarray] = []
        while len(found) < count:
            number = self._window_of(position + len(found))
            packed, offset = self._window(number), position + len(found) - self._marks[number].position
            found += [packed[i] for i in range(offset, min(len(packed), offset + count - len(found)))]
        return found

    def document(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a document of a sequence, and which of them are learned."""
        return self.sources[place["source"]].store.document(int(place["chunk"]), int(place["index"]))

    def step(self, position: int, batch_size: int, micro: int, rank: int, ranks: int) -> StepBatch:
        """The share of `rank` of the batch that begins at a global position."""
        count = batch_size if self.epochs is None else min(batch_size, self.epochs.left(position))
        assert count, f"the run has ended before sequence {position}"
        sequences = self.sequences(position, count)
        documents = np.concatenate(sequences, dtype=DOCUMENT)
        units = self.layout.units(documents)
        by_source = np.bincount(documents["source"], weights=units, minlength=len(self.sources))
        epoch = self.locate(position)[0]
        assert self.epochs is None or self.locate(position + count - 1)[0] == epoch, "a step straddles two epochs"
        mine = [sequences[turn.start : turn.stop] for turn in micro_batches(count, micro, rank, ranks)]
        return StepBatch(
            [self.collate(rows, epoch) if rows else self._stand_in(sequences, epoch) for rows in mine],
            int(units.sum()),
            int(documents["length"].sum()) - self._head * len(documents),
            self._progress(position + count),
            tuple(int(n) for n in by_source),
            count,
        )

    def _stand_in(self, sequences: Sequence[np.ndarray], epoch: int) -> Any:
        """What a rank without rows computes, since forwards are collective: the step's shortest row, uncounted."""
        shortest = min(sequences, key=lambda documents: int(documents["length"].sum()))
        return replace(self.collate([shortest], epoch), counts=False)

    @property
    def source_count(self) -> int:
        """How many sources there are."""
        return len(self.sources)

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        """Tokens of a document, LEARNED set in those that are learned."""
        return self.sources[source].store.marked(chunk, index)

    def collate(self, sequences: Sequence[np.ndarray], epoch: int = 0) -> Any:
        """Sequences of documents as the model takes them."""
        return self.layout.collate(self, sequences, epoch)

    def _epoch_marks(self, epoch: int) -> tuple[_Mark, _Mark]:
        """Where an epoch begins and where the next does."""
        while len(self._epochs) <= epoch + 1:
            self._advance()
        return self._marks[self._epochs[epoch]], self._marks[self._epochs[epoch + 1]]

    def _window_of(self, position: int) -> int:
        """The number, in the run, of the window in which a sequence lies; packs as many windows as that takes."""
        while self._marks[-1].position <= position:
            self._advance()
        return bisect_right(self._marks, position, key=lambda mark: mark.position) - 1

    def _advance(self) -> None:
        """Packs the next window of the run, and so finds where the one after it begins."""
        number, mark = len(self._marks) - 1, self._marks[-1]
        packed, taken, carry, ended = self._pack(mark)
        self._keep(number, packed)
        tokens = mark.tokens + int(packed.documents["length"].sum()) - self._head * len(packed.documents)
        position, documents = mark.position + len(packed), mark.documents + len(packed.documents)
        if not ended:
            self._marks.append(_Mark(mark.epoch, mark.window + 1, position, taken, carry, documents, tokens))
            return
        if not position and self._mixture.documents(0) < 1:
            names = ", ".join(self.names)
            problem = "there is not one document for an epoch of the run"
            raise UserError("data.train", names, problem, "check the files, data.refine and the sources' epochs")
        self._marks.append(_Mark(mark.epoch + 1, 0, position, self._mixture.start, carry, 0, tokens))
        self._epochs.append(len(self._marks) - 1)

    def _window(self, number: int) -> Packed:
        """A window whose beginning is known."""
        if number not in self._packed:
            self._keep(number, self._pack(self._marks[number])[0])
        return self._packed[number]

    def _keep(self, number: int, packed: Packed) -> None:
        self._packed[number] = packed
        while len(self._packed) > KEPT:
            self._packed.popitem(last=False)

    def _pack(self, mark: _Mark) -> tuple[Packed, tuple[int, ...], np.ndarray, bool]:
        documents, taken, ended = self._mixture.window(mark.epoch, mark.taken)
        rng = sequence_order(self.seed, mark.epoch, mark.window)
        together = np.concatenate([mark.carry, documents])
        packed, carry = pack(together, self.sequence_length + self._head, self.packing, rng, last=ended)
        return packed, taken, carry, ended

    def _progress(self, position: int) -> float:
        """How many epochs have been seen; told by documents, and expected ones where a source is not complete yet."""
        number = bisect_right(self._marks, position, key=lambda mark: mark.position) - 1
        mark = self._marks[number]
        documents = float(mark.documents)
        if number + 1 < len(self._marks):
            packed = self._window(number)
            documents += len(packed.documents) * (position - mark.position) / len(packed)
        whole = self._mixture.documents(mark.epoch)
        return mark.epoch + (min(1.0, documents / whole) if whole else 0.0)
