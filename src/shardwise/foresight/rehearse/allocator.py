"""What PyTorch's caching allocator makes of a step: bytes handed out, and bytes kept from the device (reserved).

[Note: caching] Sizes are rounded up to 512 bytes. Up to 1 MiB comes out of segments of 2 MiB, less than 10 MiB out of
segments of 20 MiB, more out of a segment of its own, in steps of 2 MiB. The smallest free block that is large enough is
taken and cut, but for a rest of up to 1 MiB (512 bytes among small ones), which goes along and counts as handed out.
Freed blocks join free neighbours of their segment. Streams do not share segments.
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
    """The allocator of one device."""

    reserved: int = 0
    allocated: int = 0
    most_reserved: int = 0
    most_allocated: int = 0
    _free: dict[tuple[str, bool], list[tuple[int, int]]] = field(default_factory=dict)
    _pieces: dict[int, _Piece] = field(default_factory=dict)  # free ones, by where they start
    _used: dict[int, tuple[_Piece, tuple[str, bool]]] = field(default_factory=dict)
    _end: int = 0

    def take(self, number: int, size: int, stream: str = "") -> None:
        """A block of at least `size` bytes, by a number of the caller's."""
        size = max(STEP, -(-size // STEP) * STEP)
        pool = (stream, size <= SMALL)
        piece = self._found(pool, size) or self._segment(size)
        rest = piece.size - size
        if rest >= STEP if pool[1] else rest > SMALL:
            other = _Piece(piece.start + size, rest, True, piece, piece.after)
            if piece.after is not None:
                piece.after.before = other
            piece.size, piece.after = size, other
            self._offer(other, pool)
        piece.free = False
        self._used[number] = piece, pool
        self.allocated += piece.size
        self.most_allocated = max(self.most_allocated, self.allocated)

    def give(self, number: int) -> None:
        """Gives a block back."""
        piece, pool = self._used.pop(number)
        self.allocated -= piece.size
        for other in (piece.before, piece.after):
            if other is not None and other.free:
                self._withdraw(other, pool)
                piece = _joined(piece, other)
        piece.free = True
        self._offer(piece, pool)

    def _found(self, pool: tuple[str, bool], size: int) -> _Piece | None:
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        _, start = free.pop(at)
        return self._pieces.pop(start)

    def _segment(self, size: int) -> _Piece:
        whole = 2 * MIB if size <= SMALL else 20 * MIB if size < MIDDLE else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)
        piece = _Piece(self._end, whole)
        self._end += whole
        return piece

    def _offer(self, piece: _Piece, pool: tuple[str, bool]) -> None:
        insort(self._free.setdefault(pool, []), (piece.size, piece.start))
        self._pieces[piece.start] = piece

    def _withdraw(self, piece: _Piece, pool: tuple[str, bool]) -> None:
        free = self._free[pool]
        del free[bisect_left(free, (piece.size, piece.start))]
        del self._pieces[piece.start]


def _joined(a: _Piece, b: _Piece) -> _Piece:
    first, second = (a, b) if a.start < b.start else (b, a)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


@dataclass(frozen=True)
class Event:
    """A block comes (size > 0) or goes."""

    number: int
    size: int
    stream: str = ""


def replay(held: Iterable[Event], step: list[Event], times: int = 2) -> Allocator:
    """What is held, then a step again and again; the last time counts for `most_allocated`."""
    found = Allocator()
    for event in held:
        found.take(event.number, event.size, event.stream)
    for _ in range(times):
        found.most_allocated = found.allocated
        for event in step:
            if event.size:
                found.take(event.number, event.size, event.stream)
            else:
                found.give(event.number)
    return found
