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
    """Number of sequences trained on in each epoch of a run; the last epoch may be partial."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, count: float, sequences: Callable[[int], int]) -> Epochs:
        """`count` epochs of the given numbers of sequences (packing makes them differ by a few); 1.5 ends mid-epoch."""
        exact = Fraction(str(count))
        parts = [min(Fraction(1), exact - epoch) for epoch in range(ceil(exact))]
        return cls(tuple(ceil(part * sequences(epoch)) for epoch, part in enumerate(parts)))

    @property
    def end(self) -> int:
        """Global position at which the run ends."""
        return sum(self.sizes)

    def left(self, position: int) -> int:
        """Number of sequences from a position to the end of its epoch; 0 after the end of the run."""
        end = 0
        for size in self.sizes:
            end += size
            if position < end:
                return end - position
        return 0

    def steps(self, batch_size: int, position: int = 0) -> int:
        """Number of optimizer steps from a position to the end of the run."""
        steps, end = 0, 0
        for size in self.sizes:
            end += size
            steps -= -max(0, min(size, end - position)) // batch_size  # rounded up
        return steps

    def in_words(self, count: float, batch_size: int, steps: int | None) -> str:
        """One-line description: epochs, sequences, sequences per step, and `steps` if the run is cut short."""
        several = count == len(self.sizes)
        length = _range(self.sizes) if several else f"{self.end:,}"
        text = (
            f"{count:g} epoch{'s' * (count != 1)}{' of' if several else ','} {length} sequence{'s' * (length != '1')}"
        )
        last = [size % batch_size for size in self.sizes if size % batch_size]
        if max(self.sizes) < batch_size:
            text += ", one step each"
        else:
            text += f", {batch_size} a step" + (f" and {_range(last)} in the last of an epoch" if last else "")
        cut = steps is not None and steps < self.steps(batch_size)
        return f"{text}; ended after {steps} of {self.steps(batch_size)} steps" if cut else text


def stream_in_words(steps: int, batch_size: int, sequences: int) -> str:
    """One-line description of how many epochs `steps` full steps amount to."""
    return f"{steps * batch_size / sequences:.2f} epochs of {sequences:,} sequences"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


def micro_batches(count: int, micro: int, rank: int, ranks: int) -> list[range]:
    """Ranges of sequences of a rank's micro-batches, the same number on every rank since forwards are collective.

    All but the last have `micro` sequences. What is left for the last is spread over the ranks, of which some may get
    an empty range.
    """
    together = micro * ranks
    full = count // together * together
    ranges = [range(first + rank * micro, first + (rank + 1) * micro) for first in range(0, full, together)]
    if left := count - full:
        each, more = divmod(left, ranks)
        first = full + rank * each + min(rank, more)
        ranges.append(range(first, first + each + (rank < more)))
    return ranges
