"""Finds rows that repeat earlier ones, within and across sources; the first in source order is kept.

[Note: repeats] Exact: the same text by the same roles, after Unicode NFC and with every run of white space as one
space; case counts, and so do system prompts, tools, weights and labels. Near: the sets of word 5-grams (word_hashes.py;
a row of fewer words is one n-gram, system prompts are ignored) have a Jaccard similarity of at least
`refine.similarity` with an earlier row *that is kept*. It is not transitive: of A ~ B ~ C with A unlike C, B is dropped
and C is kept, so everything that is dropped is still there in much the same words.

[Note: minhash] Workers compute keys of chunks of rows (`row_keys`); the parent collects them in files
(`DuplicateFinder`). A row has a few band keys, each of some minimum hashes; rows that share one are candidates, and
every candidate is verified on the n-grams themselves, so false positives cost time only. Bands are chosen so that a
pair at the threshold is found with 99% probability. Own numpy code, because the index must not grow in memory with the
source: datasketch 2.0 holds 6 KB in Python objects per row of 146 words (and takes 3 times as long:
benchmarks/duplicates.py); here it is 100 bytes in memory, 700 where nearly all rows are near-duplicates, and the keys
on disk while rows are compared.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from shardwise.config.schema import Refine
from shardwise.data.examples import Example
from shardwise.data.word_hashes import dumped, hashed_words, mix, ngrams, parts

WORDS = 5  # of an n-gram
HASHES = 128  # at most, per row
FOUND = 0.99  # share of pairs at the threshold that become candidates
KEPT = 4096  # n-grams kept of a row, the lowest hashes; the similarity of longer rows is estimated from these (±1%)
LOOKED_AT = 1024  # rows of one bucket that a row is compared with; more occur where all rows share a template
MARKS, MARK_SHIFT = 1 << 20, np.uint32(12)
VERIFIED = 64  # candidates of a row, those first that share most bands


class Removal(NamedTuple):
    """Why a row is dropped."""

    fate: str
    reason: str


@dataclass(frozen=True)
class RowKeys:
    """Keys by which a chunk of rows is compared, computed in a worker."""

    numbers: np.ndarray  # (rows,) int64: of each row in its source
    wheres: list[str]
    digests: np.ndarray  # (rows, 2) uint64
    bands: np.ndarray  # (rows, bands) uint64; no columns for exact duplicates
    sizes: np.ndarray  # (rows,) int64: n-grams kept
    grams: np.ndarray  # (sum of sizes,) uint32, sorted within each row


def row_keys(examples: Sequence[Example], refine: Refine) -> RowKeys:
    """Returns the keys of consecutive rows of a source."""
    digests = np.frombuffer(b"".join(map(_digest, examples)), dtype=np.uint64).reshape(-1, 2)
    if refine.duplicates == "near":
        grams, sizes = _gram_sets(examples)
        bands = _band_keys(grams, sizes, *band_shape(refine.similarity))
        grams, sizes = _lowest(grams, sizes)
    else:
        grams = np.empty(0, dtype=np.uint32)
        sizes = np.zeros(len(examples), dtype=np.int64)
        bands = np.empty((len(examples), 0), dtype=np.uint64)
    numbers = np.array([e.number for e in examples], dtype=np.int64)
    return RowKeys(numbers, [e.where for e in examples], digests, bands, sizes, grams)


def band_shape(similarity: float) -> tuple[int, int]:
    """Number of bands and hashes per band: the most selective choice with 99% recall at this similarity."""
    best = (1, 1)
    for rows in range(1, HASHES + 1):
        chance = similarity**rows
        bands = 1 if chance >= FOUND else math.ceil(math.log(1 - FOUND) / math.log1p(-chance))
        if bands * rows <= HASHES:
            best = bands, rows
    return best if similarity < 1 else (1, 8)


def _digest(example: Example) -> bytes:
    """128-bit digest of everything that exact duplicates must share."""
    # The separators are white space to Python, so no text that went through split() has them.
    fields = [f"{role}\x1e{' '.join(unicodedata.normalize('NFC', text).split())}" for role, text in parts(example)]
    rest = (example.tools, example.weights if any(w is not None for w in example.weights) else (), example.label)
    if any(rest[:2]) or example.label is not None or example.learned is not None:
        fields.append(dumped([*rest, None if example.learned is None else list(map(int, example.learned))]))
    return blake2b("\x1f".join(fields).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _gram_sets(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Sorted n-gram hashes (uint32) of each row, concatenated, and their sizes."""
    hashes, counts = hashed_words(examples, fill=WORDS, roles=True, signs=True)
    grams, counts = ngrams(hashes, counts, WORDS)
    row = np.repeat(np.arange(len(examples), dtype=np.uint64), counts)
    keys = np.sort(row << np.uint64(32) | grams >> np.uint64(32))
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
    sizes = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(examples))
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32), sizes.astype(np.int64)


def _band_keys(grams: np.ndarray, sizes: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Band keys of each row; those of a row without words are never used."""
    keys = np.zeros((len(sizes), bands), dtype=np.uint64)
    some = np.flatnonzero(sizes)
    if not len(some):
        return keys
    starts = (np.cumsum(sizes) - sizes)[some]
    draw = np.random.default_rng(0)  # the same in every worker
    factors = draw.integers(0, 1 << 32, bands * rows, dtype=np.uint32) | np.uint32(1)
    shifts = draw.integers(0, 1 << 32, bands * rows, dtype=np.uint32)
    for band in range(bands):
        key = np.full(len(some), band, dtype=np.uint64)
        for index in range(band * rows, (band + 1) * rows):
            permuted = grams * factors[index]
            permuted ^= shifts[index]
            key = mix(key) + np.minimum.reduceat(permuted, starts)
        keys[some, band] = mix(key)
    return keys


def _lowest(grams: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest `KEPT` n-gram hashes of each row."""
    if (sizes <= KEPT).all():
        return grams, sizes
    place = np.arange(len(grams)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return grams[place < KEPT], np.minimum(sizes, KEPT)


def similarity(first: np.ndarray, second: np.ndarray) -> float:
    """Jaccard similarity of two n-gram sets; for rows longer than `KEPT`, estimated from the hashes kept of both."""
    if cut := [a[-1] for a in (first, second) if len(a) == KEPT]:
        first, second = (a[: np.searchsorted(a, min(cut), "right")] for a in (first, second))
    union = len(np.union1d(first, second))
    return (len(first) + len(second) - union) / union if union else 0.0


def _possible(size: int, others: np.ndarray, least: float) -> np.ndarray:
    """Which sets have a size that allows the similarity; the size of truncated sets is unknown."""
    fits = np.minimum(size, others) >= least * np.maximum(size, others)
    return np.asarray(fits | (others == KEPT) | (size == KEPT))


def _bounds(grams: np.ndarray, others: list[np.ndarray], marks: np.ndarray) -> np.ndarray:
    """Upper bounds of the similarities with many sets at once, comparing n-grams by their first 20 bits."""
    sizes = np.array([len(other) for other in others])
    slots = grams >> MARK_SHIFT
    marks[slots] = 1
    common = np.add.reduceat(marks[np.concatenate(others) >> MARK_SHIFT], np.cumsum(sizes) - sizes, dtype=np.int64)
    marks[slots] = 0
    return np.asarray(common / np.maximum(len(grams) + sizes - common, 1))


class DuplicateFinder:
    """Collects the keys of all rows in a folder, in the order of sources and rows, and finds duplicates."""

    def __init__(self, refine: Refine, folder: Path) -> None:
        self.refine, self.folder = refine, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.bands = band_shape(refine.similarity)[0] if refine.duplicates == "near" else 0
        self._files: dict[str, BinaryIO] = {}
        self._last = (-1, -1)
        self.rows = 0

    def add(self, source: int, keys: RowKeys) -> None:
        """Adds the keys of a chunk; chunks must come in the order of sources and rows."""
        if not len(keys.numbers):
            return
        assert self._last < (source, int(keys.numbers[0])), "chunks must be added in order"
        self._last = source, int(keys.numbers[-1])
        self.rows += len(keys.numbers)
        locations = [where.encode("utf-8", "surrogatepass") for where in keys.wheres]
        self._append("source", np.full(len(locations), source, dtype=np.int32))
        self._append("number", keys.numbers)
        self._append("digest", keys.digests)
        self._append("where_size", np.array([len(w) for w in locations], dtype=np.int32))
        self._append("where", np.frombuffer(b"".join(locations), dtype=np.uint8))
        if self.bands:
            self._append("size", keys.sizes.astype(np.int32))
            self._append("grams", keys.grams)
            for band in range(self.bands):
                self._append(f"band{band}", np.ascontiguousarray(keys.bands[:, band]))

    def removed(self) -> Removals:
        """Returns the duplicates once every chunk has been added; keeps only the file of row locations."""
        for file in self._files.values():
            file.close()
        original = self._exact()
        exact = original >= 0
        likeness = np.ones(self.rows, dtype=np.float32)
        if self.bands:
            self._near(original, likeness)
        duplicates = np.flatnonzero(original >= 0)
        lengths = self._read("where_size", np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)[original[duplicates]]
        table = {
            "source": self._read("source", np.int32)[duplicates],
            "number": self._read("number", np.int64)[duplicates],
            "near": ~exact[duplicates],
            "likeness": likeness[duplicates],
            "where_begin": ends - lengths[original[duplicates]],
            "where_end": ends,
        }
        locations = self._read("where", np.uint8)
        for name in self._files.keys() - {"where"}:
            (self.folder / name).unlink()
        return Removals(table, locations)

    def _exact(self) -> np.ndarray:
        """For each row the index of the first identical row, -1 if it is the first."""
        original = np.full(self.rows, -1, dtype=np.int64)
        digests = self._read("digest", np.uint64).reshape(-1, 2)
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: of the same ones the first row comes first
        ranked = digests[order]
        repeated = np.zeros(self.rows, dtype=bool)
        repeated[1:] = (ranked[1:] == ranked[:-1]).all(axis=1)
        first = order[np.maximum.accumulate(np.where(repeated, 0, np.arange(self.rows)))]
        original[order[repeated]] = first[repeated]
        return original

    def _near(self, original: np.ndarray, likeness: np.ndarray) -> None:
        sizes = self._read("size", np.int32)
        ends = np.cumsum(sizes, dtype=np.int64)
        grams = self._read("grams", np.uint32)
        buckets = self._buckets(np.flatnonzero((original < 0) & (sizes > 0)))
        least = self.refine.similarity

        def gram_set(row: int) -> np.ndarray:
            return grams[ends[row] - sizes[row] : ends[row]]

        marks = np.zeros(MARKS, dtype=np.uint8)
        for row, shared in buckets:
            row_grams = gram_set(row)
            candidates = buckets.kept(shared)
            if len(candidates):
                candidates = candidates[_possible(len(row_grams), sizes[candidates], least)][:VERIFIED]
            if len(candidates) > 1:
                likely = _bounds(row_grams, [gram_set(candidate) for candidate in candidates.tolist()], marks) >= least
                candidates = candidates[likely | (sizes[candidates] == KEPT) | (len(row_grams) == KEPT)]
            for candidate in candidates.tolist():
                if (score := similarity(row_grams, gram_set(candidate))) >= least:
                    original[row], likeness[row] = candidate, score
                    break
            else:
                buckets.keep(row, shared)

    def _buckets(self, rows: np.ndarray) -> _Buckets:
        """Rows that share a band key with another one, by bucket."""
        members, sizes = [], []
        for band in range(self.bands):
            keys = self._read(f"band{band}", np.uint64)[rows]
            order = np.argsort(keys, kind="stable")
            ranked = keys[order]
            starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]])) if len(rows) else order
            counts = np.diff(np.append(starts, len(rows)))
            shared = counts > 1
            members.append(rows[order[np.repeat(shared, counts)]].astype(np.uint32))
            sizes.append(counts[shared])
        return _Buckets(np.concatenate(members), np.concatenate(sizes))

    def _append(self, name: str, array: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = (self.folder / name).open("wb")
        self._files[name].write(array.tobytes())

    def _read(self, name: str, dtype: type[np.generic]) -> np.ndarray:
        file = self.folder / name
        if name not in self._files or not file.stat().st_size:
            return np.empty(0, dtype=dtype)
        return np.memmap(file, dtype=dtype, mode="r")


class _Buckets:
    """Kept rows by bucket, updated in place: the array never grows."""

    def __init__(self, members: np.ndarray, sizes: np.ndarray) -> None:
        self._members = members
        self._starts = np.cumsum(sizes) - sizes
        self._filled = np.zeros(len(sizes), dtype=np.int64)
        order = np.argsort(members, kind="stable")
        self._of = np.repeat(np.arange(len(sizes), dtype=np.uint32), sizes)[order]
        self._rows, starts = np.unique(members[order], return_index=True)
        self._bounds = np.append(starts, len(members))

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields each row that is in some bucket, in order, with its buckets."""
        for index in range(len(self._rows)):
            yield int(self._rows[index]), self._of[self._bounds[index] : self._bounds[index + 1]]

    def kept(self, buckets: np.ndarray) -> np.ndarray:
        """Kept rows that share a bucket, sorted by the number of shared buckets."""
        starts = self._starts[buckets]
        filled = np.minimum(self._filled[buckets], LOOKED_AT)
        members = [self._members[s : s + n] for s, n in zip(starts.tolist(), filled.tolist(), strict=True) if n]
        if len(members) <= 1:
            return members[0].copy() if members else self._members[:0]
        rows, shared = np.unique(np.concatenate(members), return_counts=True)
        return np.asarray(rows[np.argsort(-shared, kind="stable")])

    def keep(self, row: int, buckets: np.ndarray) -> None:
        """Marks a row as kept."""
        self._members[self._starts[buckets] + self._filled[buckets]] = row
        self._filled[buckets] += 1


class Removals:
    """Duplicate rows by source and row number; reasons are built on demand."""

    def __init__(self, table: dict[str, np.ndarray], locations: np.ndarray) -> None:
        self._table, self._wheres = table, locations

    def __len__(self) -> int:
        return len(self._table["number"])

    def counts(self) -> dict[str, int]:
        """Number of dropped rows by fate."""
        near = int(self._table["near"].sum())
        return {"duplicate": len(self) - near, "near duplicate": near}

    def of(self, source: int, first: int = 0, stop: int | None = None) -> dict[int, Removal]:
        """Dropped rows of a source by number, from `first` up to `stop`: small enough to send along with a chunk."""
        low, high = np.searchsorted(self._table["source"], [source, source + 1])
        numbers = self._table["number"][low:high]
        begin = int(low + np.searchsorted(numbers, first))
        end = int(high if stop is None else low + np.searchsorted(numbers, stop))
        return {int(self._table["number"][i]): self._removal(i) for i in range(begin, end)}

    def _removal(self, index: int) -> Removal:
        begin, end = (int(self._table[edge][index]) for edge in ("where_begin", "where_end"))
        where = self._wheres[begin:end].tobytes().decode("utf-8", "surrogatepass")
        if not self._table["near"][index]:
            return Removal("duplicate", f"repeats {where}")
        return Removal("near duplicate", f"{self._table['likeness'][index]:.0%} like {where}")
