"""Finds training rows that share an n-gram of words (word_hashes.py) with an evaluation source, whatever the role.

Words are compared in lower case and without punctuation; system prompts are ignored, as evaluation and training rows
often share one. An evaluation row shorter than n words matches only a training row with no other words. The n-grams of
the evaluation sources are stored as sorted 64-bit hashes in files that workers map into memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.examples import Example
from shardwise.data.word_hashes import hashed_words, ngrams

BATCH = 2048  # examples that are hashed at a time
MARKS = 1 << 22  # bits of a hash that are looked up first: most n-grams are told apart by these alone


class EvalNgrams:
    """N-grams of the evaluation sources, stored in a folder; pickles as its path."""

    def __init__(self, folder: Path, words: int) -> None:
        self.folder, self.words = folder, words
        self._hashes = _open(folder / "hashes.npy")
        self._rows = _open(folder / "rows.npy")
        self._wheres = (folder / "wheres.txt").read_text(encoding="utf-8", errors="surrogatepass").split("\0")
        self._marked = np.zeros(MARKS, dtype=bool)
        self._marked[_mark(self._hashes)] = True

    @classmethod
    def from_examples(cls, examples: Iterable[Example], words: int, folder: Path) -> EvalNgrams:
        """Writes the n-grams of all examples to the folder."""
        hashes, rows = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.uint32)]
        locations: list[str] = []
        rest = iter(examples)
        while batch := list(islice(rest, BATCH)):
            grams, counts = _passages(batch, words)
            hashes.append(grams)
            rows.append(np.repeat(np.arange(len(locations), len(locations) + len(batch), dtype=np.uint32), counts))
            locations += [example.where for example in batch]
        unique, first = np.unique(np.concatenate(hashes), return_index=True)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "hashes.npy", unique)
        np.save(folder / "rows.npy", np.concatenate(rows)[first])
        (folder / "wheres.txt").write_text("\0".join(locations), encoding="utf-8", errors="surrogatepass")
        return cls(folder, words)

    def __reduce__(self) -> tuple[Any, ...]:
        return EvalNgrams, (self.folder, self.words)

    def hit(self, example: Example) -> str | None:
        """Reason naming the evaluation row that shares an n-gram with the example; None if there is none."""
        return self.hits([example])[0]

    def hits(self, examples: Sequence[Example]) -> list[str | None]:
        """Batched `hit`, which is faster."""
        reasons: list[str | None] = [None] * len(examples)
        grams, counts = _passages(examples, self.words)
        marked = np.flatnonzero(self._marked[_mark(grams)])
        if not len(marked):
            return reasons
        places = np.minimum(np.searchsorted(self._hashes, grams[marked]), len(self._hashes) - 1)
        matching = self._hashes[places] == grams[marked]
        owners = np.searchsorted(np.cumsum(counts), marked[matching], "right")
        for owner, place in zip(owners.tolist(), places[matching].tolist(), strict=True):
            if reasons[owner] is None:
                shared = f"{self.words} words in a row" if counts[owner] > 1 else "all its words"
                reasons[owner] = f"{shared} are in {self._wheres[self._rows[place]]}"
        return reasons


def _passages(examples: Sequence[Example], words: int) -> tuple[np.ndarray, np.ndarray]:
    # A shorter row is filled up with words that no row has: its one n-gram is equal only to that of an equal row.
    return ngrams(*hashed_words(examples, fill=words), words)


def _mark(hashes: np.ndarray) -> np.ndarray:
    return hashes >> np.uint64(64 - (MARKS - 1).bit_length())


def _open(file: Path) -> np.ndarray:
    array: np.ndarray = np.load(file, mmap_mode="r")
    return array if len(array) else np.empty(0, dtype=array.dtype)
