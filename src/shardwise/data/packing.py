"""Packs documents into sequences by best-fit decreasing, to minimise padding.

A window of 65,536 documents takes about 80 ms: the free space of sequences is a bit set in integers, so the best
sequence for a document is the lowest set bit from its length on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK = 512  # rooms per integer

# A document by source, chunk and place in the chunk, with what is needed to lay it out.
DOCUMENT = np.dtype(
    [("source", np.int32), ("chunk", np.int32), ("index", np.int32), ("length", np.int32), ("supervised", np.int32)]
)


@dataclass(frozen=True)
class Packed:
    """Concatenated sequences: sequence i is documents[bounds[i] : bounds[i + 1]]."""

    documents: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[self.bounds[index] : self.bounds[index + 1]]


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Sequence index of each document: the one it leaves the least room in; longest first, ties in input order."""
    order = np.argsort(-lengths, kind="stable")
    ordered = lengths[order].tolist()
    smallest = ordered[-1] if ordered else 0
    waiting: list[list[int]] = [[] for _ in range(capacity + 1)]  # sequences by room left
    open_rooms = [0] * (capacity // BLOCK + 1)  # bit r % BLOCK of word r // BLOCK is set where a sequence has room r
    open_blocks = 0  # bit b is set where word b is not zero: two levels, for integers of 131,072 bits are slow
    chosen, count = [], 0
    for length in ordered:
        block, low = divmod(length, BLOCK)
        fitting = open_rooms[block] >> low
        room = length
        if not fitting and (further := open_blocks >> (block + 1)):
            block += (further & -further).bit_length()
            fitting = open_rooms[block]
            room = block * BLOCK
        if fitting:
            room += (fitting & -fitting).bit_length() - 1
            sequence = waiting[room].pop()
            if not waiting[room]:
                open_rooms[block] ^= 1 << room % BLOCK
                if not open_rooms[block]:
                    open_blocks ^= 1 << block
        else:
            room, sequence = capacity, count
            count += 1
        chosen.append(sequence)
        left = room - length
        if left >= smallest:  # else nothing more will fit
            waiting[left].append(sequence)
            open_rooms[left // BLOCK] |= 1 << left % BLOCK
            open_blocks |= 1 << left // BLOCK
    result = np.empty(len(lengths), dtype=np.int64)
    result[order] = chosen
    return result


def pack(
    documents: np.ndarray, capacity: int, packing: bool, rng: np.random.Generator, last: bool
) -> tuple[Packed, np.ndarray]:
    """Returns the shuffled sequences of a window of documents, and the documents carried over to the next window.

    With best fit at most one sequence is less than half full, since the contents of a second would have fitted into the
    first. That one is carried over, unless this is the last window.
    """
    documents = documents[rng.permutation(len(documents))]
    carry = np.empty(0, dtype=documents.dtype)  # no slice: it is kept, and would keep the whole window alive
    if not packing:
        return Packed(documents, np.arange(len(documents) + 1)), carry
    sequence = best_fit(documents["length"], capacity)
    filled = np.bincount(sequence, weights=documents["length"])
    if not last and len(filled) and 2 * filled.min() < capacity:
        waits = sequence == filled.argmin()
        carry = documents[waits]
        documents = documents[~waits]
        sequence = sequence[~waits]
    place = rng.permutation(len(filled))[sequence]
    by_place = np.argsort(place, kind="stable")
    sizes = np.bincount(place, minlength=len(filled))
    return Packed(documents[by_place], np.concatenate([[0], np.cumsum(sizes[sizes > 0])])), carry
