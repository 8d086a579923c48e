"""Simulates PyTorch's caching allocator over a step: bytes allocated, and bytes reserved from the device.

[Note: caching] Sizes are rounded up to 512 bytes. Up to 1 MiB comes out of segments of 2 MiB, less than 10 MiB out of
segments of 20 MiB, more out of a segment of its own, in steps of 2 MiB. The smallest free block that is large enough is
taken and split, unless the remainder is up to 1 MiB (512 bytes among small ones): then it counts as allocated too.
Freed blocks merge with free neighbours of their segment. Streams do not share segments.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 2**20
STEP = 512
SMALL, MIDDLE = MIB, 10 * MIB


@dataclass
class _Piece:
    """Part of a segment, with its neighbours."""

    start: int
    size: int
    free: bool = True
    before: _Piece | None = None
    after: _Piece | None = None


@dataclass
class Allocator:
    """Simulated caching allocator of one device."""

    reserved: int = 0
    allocated: int = 0
    most_reserved: int = 0
    most_allocated: int = 0
    _free: dict[tuple[str, bool], list[tuple[int, int]]] = field(default_factory=dict)
    _pieces: dict[int, _Piece] = field(default_factory=dict)  # free ones, by where they start
    _used: dict[int, tuple[_Piece, tuple[str, bool]]] = field(default_factory=dict)
    _end: int = 0

    def take(self, number: int, size: int, stream: str = "") -> None:
        """Allocates a block of at least `size` bytes under the caller's `number`."""
        size = max(STEP, -(-size // STEP) * STEP)
        pool = (stream, size <= SMALL)
        piece = self._best_fit(pool, size) or self._segment(size)
        remainder = piece.size - size
        if remainder >= STEP if pool[1] else remainder > SMALL:
            other = _Piece(piece.start + size, remainder, True, piece, piece.after)
            if piece.after is not None:
                piece.after.before = other
            piece.size = size
            piece.after = other
            self._add_free(other, pool)
        piece.free = False
        self._used[number] = piece, pool
        self.allocated += piece.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def give(self, number: int) -> None:
        """Frees a block."""
        piece, pool = self._used.pop(number)
        self.allocated -= piece.size
        for other in (piece.before, piece.after):
            if other is not None and other.free:
                self._remove_free(other, pool)
                piece = _merged(piece, other)
        piece.free = True
        self._add_free(piece, pool)

    def _best_fit(self, pool: tuple[str, bool], size: int) -> _Piece | None:
        free = self._free.setdefault(pool, [])
        index = bisect_left(free, (size, -1))
        if index == len(free):
            return None
        _, start = free.pop(index)
        return self._pieces.pop(start)

    def _segment(self, size: int) -> _Piece:
        if size <= SMALL:
            segment_size = 2 * MIB
        elif size < MIDDLE:
            segment_size = 20 * MIB
        else:
            segment_size = -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += segment_size
        self.most_reserved = max(self.most_reserved, self.reserved)
        piece = _Piece(self._end, segment_size)
        self._end += segment_size
        return piece

    def _add_free(self, piece: _Piece, pool: tuple[str, bool]) -> None:
        insort(self._free.setdefault(pool, []), (piece.size, piece.start))
        self._pieces[piece.start] = piece

    def _remove_free(self, piece: _Piece, pool: tuple[str, bool]) -> None:
        free = self._free[pool]
        del free[bisect_left(free, (piece.size, piece.start))]
        del self._pieces[piece.start]


def _merged(a: _Piece, b: _Piece) -> _Piece:
    first, second = (a, b) if a.start < b.start else (b, a)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


@dataclass(frozen=True)
class Event:
    """Allocation (size > 0) or free of a block."""

    number: int
    size: int
    stream: str = ""


def replay(held: Iterable[Event], step: list[Event], times: int = 2) -> Allocator:
    """Allocates what is held, then replays the step `times` times; the last one counts for `most_allocated`."""
    allocator = Allocator()
    for event in held:
        allocator.take(event.number, event.size, event.stream)
    for _ in range(times):
        allocator.most_allocated = allocator.allocated
        for event in step:
            if event.size:
                allocator.take(event.number, event.size, event.stream)
            else:
                allocator.give(event.number)
    return allocator
