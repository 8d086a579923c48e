"""Document order over all sources, epoch after epoch.

[Note: order] The order is a pure function of the seed and the contents of the sources; ranks and workers have no
influence. It is decided from left to right: the next documents depend only on the chunks that a source has written so
far (and slightly beyond, where only a fraction of it is used). So training can start while later chunks are still being
tokenised, and sees the same order as with everything cached.

A pass over a source goes through shuffle windows (consecutive chunks, about `packing_window` documents); the first
pass takes them in file order, later ones permute them; within a window the documents are permuted. Epoch e of the run
covers passes e·r to (e+1)·r of a source, r being its passes per epoch. Mixing windows of `packing_window` documents
take from each source in proportion to its documents per epoch.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from pathlib import Path, PurePosixPath

import numpy as np

from shardwise.config.schema import Data, Source
from shardwise.core.errors import UserError
from shardwise.data.packing import DOCUMENT
from shardwise.data.store import POLL, TokenStore

ORDER = 1  # raised when the same data and seed give another order; part of the fingerprint of checkpoints
_WINDOWS, _WITHIN, _SEQUENCES = 1, 2, 3  # what a stream of random numbers is for


@dataclass(frozen=True)
class SourceStream:
    """A source of the mixture; `rows` is the number of rows in its files (None if unknown in advance)."""

    name: str
    store: TokenStore
    rows: int | None = None
    weight: float = 1.0
    epochs: float | None = None


class LoaderClosed(Exception):
    """The loader was closed while waiting for a chunk."""


def random_stream(seed: int, purpose: int, *place: int) -> np.random.Generator:
    """Independent random generator for each purpose and position."""
    # Always the same length: numpy takes [1, 2] and [1, 2, 0] for the same seed.
    return np.random.default_rng([seed, purpose, *place, *[0] * (3 - len(place))])


def sequence_order(seed: int, epoch: int, window: int) -> np.random.Generator:
    """Random generator that shuffles the sequences of a mixing window."""
    return random_stream(seed, _SEQUENCES, epoch, window)


def passes_per_epoch(sources: Sequence[SourceStream], temperature: float = 1.0) -> list[Fraction]:
    """Passes over each source per epoch of the run: its `epochs`, or else by weight and size.

    Sources without `epochs` share their total number of rows in proportion to weight × rows^(1/temperature).
    """
    passes = {i: Fraction(str(s.epochs)) for i, s in enumerate(sources) if s.epochs is not None}
    free = [i for i in range(len(sources)) if i not in passes]
    if len({sources[i].weight for i in free}) > 1 or (temperature != 1 and len(free) > 1):
        rows = {i: Fraction(_rows(sources[i])) for i in free}
        if temperature == 1:  # exact, so that what comes to a whole pass is one
            weights = {i: Fraction(str(sources[i].weight)) * rows[i] for i in free}
        else:
            weights = {i: Fraction(sources[i].weight * float(rows[i]) ** (1 / temperature)) for i in free}
        total_rows = sum(rows.values(), Fraction(0))
        total_weight = sum(weights.values(), Fraction(0))
        for i in free:
            passes[i] = weights[i] / total_weight * total_rows / rows[i] if rows[i] else Fraction(1)
            if temperature != 1:
                passes[i] = Fraction(f"{float(passes[i]):.12g}")
    return [passes.get(i, Fraction(1)) for i in range(len(sources))]


def _rows(source: SourceStream) -> int:
    if source.rows is None:
        problem = "how many rows it has cannot be told beforehand, so weight and data.temperature cannot be applied"
        remedy = "give its share as epochs (1 = all rows once in each epoch of the run), or set streaming: false"
        raise UserError("data.train", source.name, problem, remedy)
    return source.rows


class Passes:
    """Documents of one source, pass after pass; waits for chunks only when they are needed."""

    def __init__(
        self, source: SourceStream, number: int, rate: Fraction, window: int, seed: int, stop: threading.Event
    ) -> None:
        self._store = source.store
        self._rows = source.rows
        self._number = number
        self.rate = rate
        self._size = window
        self._seed = seed
        self._stop = stop
        self._chunks = 0  # that are known
        self.known = 0  # documents in them
        self.complete = False
        self._expected: float | None = None
        # Shuffle windows that are closed: first chunk and first document of each, and where the last one ends.
        self._first_chunk, self._first_document = [0], [0]
        self._documents = lru_cache(maxsize=2)(self._shuffled)
        self._order = lru_cache(maxsize=2)(self._permuted)

    def _grow(self) -> bool:
        """Indexes one more chunk; False at the end of the source."""
        if self.complete:
            return False
        while (ready := self._store.ready(self._chunks)) is None:
            if self._stop.wait(POLL):
                raise LoaderClosed
        if ready:
            self.known += len(self._store.table(self._chunks))
            self._chunks += 1
        self.complete = not ready
        if self.known - self._first_document[-1] >= self._size or (self.complete and self._open):
            self._first_chunk.append(self._chunks)
            self._first_document.append(self.known)
        return ready

    @property
    def _open(self) -> bool:
        """Whether documents were added since the last window was closed."""
        return self.known > self._first_document[-1]

    def total(self) -> int:
        """Number of documents of the source; waits for all of it."""
        while self._grow():
            pass
        return self.known

    def expected(self) -> float:
        """Estimated documents per pass, from the first window and the number of rows; does not wait."""
        if self._expected is None:
            while len(self._first_chunk) == 1 and self._grow():
                pass
            self._expected = float(self._first_document[1]) if len(self._first_chunk) > 1 else 0.0
            if self._expected and self._rows is not None:
                rows = [self._store.table(c)["row"] for c in range(self._first_chunk[1])]
                self._expected *= self._rows / (1 + max(int(r.max()) for r in rows if len(r)))
        return self._expected

    def share(self, epoch: int) -> float:
        """Number of documents in an epoch, estimated while the source is incomplete; does not wait."""
        documents = self.known if self.complete else (self._store.facts or {}).get("documents")
        if documents is None:
            return float(self.rate) * self.expected()
        return float(floor((epoch + 1) * self.rate * documents) - floor(epoch * self.rate * documents))

    def start(self, epoch: int) -> int:
        """Number of documents, over all passes, before an epoch of the run."""
        return floor(epoch * self.rate * self.total()) if epoch else 0

    def available(self, epoch: int, consumed: int, requested: int) -> int:
        """How many of the `requested` documents the epoch still has."""
        needed = ceil((consumed + requested) / self.rate)
        while epoch == 0 and self.known < needed and self._grow():
            pass
        if epoch == 0 and self.known >= needed:
            return requested
        return min(requested, self.start(epoch + 1) - self.start(epoch) - consumed)

    def take(self, epoch: int, consumed: int, count: int) -> np.ndarray:
        """The next `count` documents of the epoch after `consumed`."""
        parts = []
        at = self.start(epoch) + consumed
        while count:
            while self.known <= at and self._grow():
                pass
            number, within = divmod(at, self.known) if self.complete else (0, at)
            documents, first = self._window_at(number, within)
            parts.append(documents[within - first : within - first + count])
            at += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, dtype=DOCUMENT)

    def _window_at(self, number: int, document: int) -> tuple[np.ndarray, int]:
        """Documents of the window of a pass that contains a position, and the position of its first document."""
        if number == 0:
            while self._first_document[-1] <= document:
                self._grow()
            window = bisect_right(self._first_document, document) - 1
            return self._documents(0, window), self._first_document[window]
        order, starts = self._order(number)
        place = int(np.searchsorted(starts, document, side="right")) - 1
        return self._documents(number, int(order[place])), int(starts[place])

    def _permuted(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Window order of a later pass, and the position of each window's first document."""
        sizes = np.diff(self._first_document)
        order = random_stream(self._seed, _WINDOWS, self._number, number).permutation(len(sizes))
        return order, np.concatenate([[0], np.cumsum(sizes[order])])[:-1]

    def _shuffled(self, number: int, window: int) -> np.ndarray:
        tables = []
        for chunk in range(self._first_chunk[window], self._first_chunk[window + 1]):
            table = self._store.table(chunk)
            part = np.empty(len(table), dtype=DOCUMENT)
            part["source"], part["chunk"], part["index"] = self._number, chunk, np.arange(len(table))
            part["length"], part["supervised"] = table["length"], table["supervised"]
            tables.append(part)
        documents = np.concatenate(tables)
        rng = random_stream(self._seed, _WITHIN, self._number, number, window)
        return documents[rng.permutation(len(documents))]


class Mixture:
    """Documents of all sources in mixing windows; a window depends only on how many were consumed before it."""

    def __init__(
        self, sources: Sequence[SourceStream], window: int, seed: int, temperature: float, stop: threading.Event
    ) -> None:
        rates = passes_per_epoch(sources, temperature)
        self._size = window
        self.passes = [Passes(s, i, rates[i], window, seed, stop) for i, s in enumerate(sources)]

    @property
    def start(self) -> tuple[int, ...]:
        """Documents consumed of each source at the beginning of an epoch."""
        return (0,) * len(self.passes)

    def window(self, epoch: int, consumed: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...], bool]:
        """The next documents of an epoch, the documents then consumed of each source, and whether it has ended."""
        counts = self._share_out(epoch, consumed)
        parts = [p.take(epoch, t, c) for p, t, c in zip(self.passes, consumed, counts, strict=True)]
        after = tuple(t + c for t, c in zip(consumed, counts, strict=True))
        ended = not any(p.available(epoch, t, 1) for p, t in zip(self.passes, after, strict=True))
        return np.concatenate(parts), after, ended

    def documents(self, epoch: int) -> float:
        """Number of documents in an epoch, estimated for sources that are not complete yet."""
        return sum(p.share(epoch) for p in self.passes)

    def _share_out(self, epoch: int, consumed: tuple[int, ...]) -> list[int]:
        """Number of documents of each source in a window; the others make up for a source that runs out."""
        counts = [0] * len(self.passes)
        running = list(range(len(self.passes)))
        while running and (room := self._size - sum(counts)):
            offered = self._in_proportion(running, [t + c for t, c in zip(consumed, counts, strict=True)], room)
            for i, more in zip(tuple(running), offered, strict=True):
                available = self.passes[i].available(epoch, consumed[i] + counts[i], more)
                counts[i] += available
                if available < more:
                    running.remove(i)
        return counts

    def _in_proportion(self, running: list[int], consumed: list[int], room: int) -> list[int]:
        """Distributes `room` so that all sources progress through the epoch evenly, to half a document.

        The k-th document of a source is due at (k + ½) / its documents per epoch; the `room` earliest are chosen.
        """
        if len(running) == 1:
            return [room]
        rates = [max(float(self.passes[i].rate) * self.passes[i].expected(), 1e-9) for i in running]
        due = []
        for i, rate in zip(running, rates, strict=True):
            # No source has more than its share and what it is behind by.
            behind = max(0.0, max(consumed[j] / r for j, r in zip(running, rates, strict=True)) * rate - consumed[i])
            limit = min(room, ceil(room * rate / sum(rates) + behind) + 2)
            due.append((consumed[i] + np.arange(limit) + 0.5) / rate)
        owner = np.repeat(np.arange(len(running)), [len(d) for d in due])
        first = np.argsort(np.concatenate(due), kind="stable")[:room]
        return [int(n) for n in np.bincount(owner[first], minlength=len(running))]


def source_names(sources: Sequence[Source]) -> list[str]:
    """Unique name for each source: its own, else the end of its path, with more of the path to disambiguate."""
    ends = [_words(s.path)[-1] for s in sources]
    names = []
    for source, end in zip(sources, ends, strict=True):
        name = source.name or end
        if source.name is None and ends.count(end) > 1:
            part = [p for p in (source.subset, source.split) if p]
            name = "/".join([end, *part] if part else _words(source.path)[-2:])
        number, free = 1, name
        while free in names:
            number += 1
            free = f"{name} {number}"
        names.append(free)
    return names


def _words(path: str) -> list[str]:
    """Words of a path, without glob patterns, file types and compression suffixes."""
    words = [w for w in PurePosixPath(path.removeprefix("hf:").replace("\\", "/")).parts if w not in ("/", "..", "~")]
    if not Path(path).expanduser().exists():  # a file may be called a[1].jsonl
        words = [w for w in words if not re.search(r"[*?\[]", w)] or ["data"]
    last = re.sub(r"\.(gz|zst|bz2|xz)$", "", words[-1])
    return [*words[:-1], re.sub(r"(?<=.)\.[A-Za-z][A-Za-z0-9]*$", "", last)]


def all_names(data: Data) -> list[str]:
    """Names of the training sources, then of the evaluation sources."""
    return source_names(data.train) + source_names(data.eval_sources)
