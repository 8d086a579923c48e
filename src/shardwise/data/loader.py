"""Serves each step's sequences to each rank, the same on any number of ranks, from any position.

The order of sequences is a pure function of the seed, so the only state is how many have been consumed. Every rank
knows the whole step, hence the global number of learned tokens, without asking the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardwise.data.packing import pack
from shardwise.data.prepare import Corpus
from shardwise.models.documents import Documents

IGNORE = -100


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward: ids, labels already shifted (labels[t] is what position t predicts), positions or mask."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    documents: Documents | None = None  # of packed rows

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        parts = (self.input_ids, self.labels, self.position_ids, self.attention_mask)
        moved: Any = (None if p is None else p.to(device, non_blocking=True) for p in parts)
        return replace(MicroBatch(*moved), documents=self.documents and self.documents.to(device))


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one step, and the counts over all ranks."""

    micro_batches: list[MicroBatch]
    supervised: int
    tokens: int
    epoch: float


class Loader:
    """Sequences of a corpus in shuffled, packed order, epoch after epoch."""

    def __init__(self, corpus: Corpus, sequence_length: int, packing: bool, seed: int, pad_id: int) -> None:
        self.corpus, self.sequence_length, self.packing, self.seed, self.pad_id = (
            corpus,
            sequence_length,
            packing,
            seed,
            pad_id,
        )
        self._lengths, self._supervised = corpus.lengths, corpus.supervised
        self._epoch = lru_cache(maxsize=2)(self._pack_epoch)
        self._sizes: list[int] = []

    def _pack_epoch(self, epoch: int) -> list[np.ndarray]:
        return pack(self._lengths, self.sequence_length, self.seed, epoch, self.packing)

    def epoch_sequences(self, epoch: int = 0) -> int:
        """How many sequences an epoch has (packing makes epochs differ by a few)."""
        while len(self._sizes) <= epoch:
            self._sizes.append(len(self._epoch(len(self._sizes))))
        return self._sizes[epoch]

    def sequence(self, index: int) -> np.ndarray:
        """Documents of the sequence at an index of the first epoch (evaluation reads just that one)."""
        return self._epoch(0)[index]

    def locate(self, position: int) -> tuple[int, int]:
        """Epoch and index within it of the sequence at a global position."""
        epoch = 0
        while position >= (size := self.epoch_sequences(epoch)):
            position -= size
            epoch += 1
        return epoch, position

    def sequences(self, position: int, count: int) -> list[np.ndarray]:
        """`count` sequences from a global position on, across epochs, each as indices of documents."""
        epoch, index = self.locate(position)
        found: list[np.ndarray] = []
        while len(found) < count:
            if index == self.epoch_sequences(epoch):
                epoch, index = epoch + 1, 0
            found.append(self._epoch(epoch)[index])
            index += 1
        return found

    def step(self, position: int, batch_size: int, micro: int, rank: int, ranks: int) -> StepBatch:
        """The share of `rank` of the batch that begins at a global position."""
        epoch, index = self.locate(position + batch_size)  # where the step leaves off
        sequences = self.sequences(position, batch_size)
        supervised = sum(int(self._supervised[s].sum()) for s in sequences)
        tokens = sum(int(self._lengths[s].sum()) for s in sequences)
        mine = [self.collate(sequences[i : i + micro]) for i in range(rank * micro, batch_size, micro * ranks)]
        return StepBatch(mine, supervised, tokens, epoch + index / self.epoch_sequences(epoch))

    def collate(self, sequences: list[np.ndarray]) -> MicroBatch:
        """Lays sequences of documents out as rows, padded to the longest row of this micro-batch."""
        width = max(int(self._lengths[s].sum()) for s in sequences)
        shape = (len(sequences), width)
        ids = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        real = np.zeros(shape, dtype=np.int64)
        for row, documents in enumerate(sequences):
            at = 0
            for document in documents:
                start, stop = int(self.corpus.starts[document]), int(self.corpus.starts[document + 1])
                end = at + stop - start
                tokens, learned = self.corpus.tokens[start:stop], self.corpus.learned[start:stop]
                ids[row, at:end] = tokens
                labels[row, at : end - 1] = np.where(learned[1:], tokens[1:], IGNORE)
                positions[row, at:end] = np.arange(stop - start)
                real[row, at:end] = 1
                at = end
            # Padding is one more document: its positions restart, so nothing real sees it and it sees nothing real.
            positions[row, at:] = np.arange(width - at)
        return MicroBatch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.from_numpy(positions) if self.packing else None,
            attention_mask=None if self.packing else torch.from_numpy(real),
            documents=Documents.of_positions(positions) if self.packing else None,
        )
