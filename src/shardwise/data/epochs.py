"""Which sequences a step takes where a run counts in epochs, and which of them each rank computes.

[Note: epochs] With `train.epochs` no step straddles two epochs: the last step of each takes what is left of it, as
PyTorch's DataLoader does with drop_last=False. So N epochs train on every document N times, the schedule ends where the
data end, and the number of steps is the sum of ceil(sequences / batch_size) over the epochs. With `train.steps` alone
every step is full and the stream continues into the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil


@dataclass(frozen=True)
class Epochs:
    """How many sequences a run trains on in each of its epochs; of the last epoch this may be a part."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, count: float, sequences: Callable[[int], int]) -> Epochs:
        """`count` epochs, each of so many sequences (packing makes them differ by a few); 1.5 is half of a second."""
        exact = Fraction(str(count))
        parts = [min(Fraction(1), exact - epoch) for epoch in range(ceil(exact))]
        return cls(tuple(ceil(part * sequences(epoch)) for epoch, part in enumerate(parts)))

    @property
    def end(self) -> int:
        """The position at which the run ends."""
        return sum(self.sizes)

    def left(self, position: int) -> int:
        """Sequences from a position to the end of its epoch; 0 where the run has ended."""
        end = 0
        for size in self.sizes:
            end += size
            if position < end:
                return end - position
        return 0

    def steps(self, batch_size: int, position: int = 0) -> int:
        """Optimizer steps from a position to the end of the run."""
        steps, end = 0, 0
        for size in self.sizes:
            end += size
            steps -= -max(0, min(size, end - position)) // batch_size  # rounded up
        return steps

    def in_words(self, count: float, batch_size: int, steps: int | None) -> str:
        """These `count` epochs, their sequences, and how many of them a step takes; ended after so many `steps`."""
        several = count == len(self.sizes)
        held = _range(self.sizes) if several else f"{self.end:,}"
        said = f"{count:g} epoch{'s' * (count != 1)}{' of' if several else ','} {held} sequence{'s' * (held != '1')}"
        last = [size % batch_size for size in self.sizes if size % batch_size]
        if max(self.sizes) < batch_size:
            said += ", one step each"
        else:
            said += f", {batch_size} a step" + (f" and {_range(last)} in the last of an epoch" if last else "")
        cut = steps is not None and steps < self.steps(batch_size)
        return f"{said}; ended after {steps} of {self.steps(batch_size)} steps" if cut else said


def stream_in_words(steps: int, batch_size: int, sequences: int) -> str:
    """How many epochs of so many sequences full steps are."""
    return f"{steps * batch_size / sequences:.2f} epochs of {sequences:,} sequences"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def micro_batches(count: int, micro: int, rank: int, ranks: int) -> list[range]:
    """A rank's micro-batches of `count` sequences, the same number on every rank: forwards are collective.

    All but the last have `micro` sequences. What is left for the last is spread over the ranks, of which some may get
    an empty range.
    """
    together = micro * ranks
    full = count // together * together
    found = [range(first + rank * micro, first + (rank + 1) * micro) for first in range(0, full, together)]
    if left := count - full:
        each, more = divmod(left, ranks)
        first = full + rank * each + min(rank, more)
        found.append(range(first, first + each + (rank < more)))
    return found
