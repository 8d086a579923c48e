"""Memory of a rehearsed step by category: at its peak, and over the step.

The category of a block of memory is known when the step is over: blocks that backward allocated and left behind are
gradients, those that forward allocated and backward freed are activations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.foresight.rehearse.allocator import Allocator, Event, replay
from shardwise.foresight.rehearse.tracker import MemoryBlock, StepTracker

CATEGORIES = (
    "parameters", "quantised base", "buffers", "optimizer", "gradients", "gathered", "communication", "activations",
    "logits and loss", "temporary",
)  # fmt: skip
POINTS = 400  # of a curve
WORKSPACE = 2 * 32 * 2**20  # cuBLAS takes 32 MiB on Hopper for each thread that computes: forward's and backward's


@dataclass(frozen=True)
class MemoryLedger:
    """The memory blocks of a step, each with its category."""

    blocks: list[tuple[MemoryBlock, str]]
    peak: int
    peak_time: int
    phases: list[tuple[int, str]]
    end: int

    def at(self, moment: int) -> dict[str, int]:
        """Returns the bytes by category at a moment."""
        sizes: Counter[str] = Counter()
        for block, category in self.blocks:
            if block.born < moment and (block.died is None or block.died > moment):
                sizes[category] += block.size
        return {c: sizes[c] for c in CATEGORIES if sizes[c]}

    def at_peak(self) -> dict[str, int]:
        """Returns the bytes by category at the peak."""
        return self.at(self.peak_time)

    def largest(self, count: int = 10) -> list[tuple[str, str, str, int]]:
        """Returns the largest entries at the peak as (category, module, operator, bytes)."""
        sizes: Counter[tuple[str, str, str]] = Counter()
        for block, category in self.blocks:
            if block.born < self.peak_time and (block.died is None or block.died > self.peak_time):
                sizes[category, block.module, block.operator] += block.size
        return [(*key, size) for key, size in sizes.most_common(count)]

    def curve(self, points: int = POINTS) -> list[tuple[float, dict[str, int]]]:
        """Returns memory over the step as (share of the step, bytes by category)."""
        moments = [round(self.end * i / points) for i in range(points + 1)]
        changes: list[tuple[int, str, int]] = []
        for block, category in self.blocks:
            changes.append((block.born, category, block.size))
            if block.died is not None:
                changes.append((block.died, category, -block.size))
        changes.sort(key=lambda change: change[0])
        sizes: Counter[str] = Counter()
        curve = []
        index = 0
        for moment in moments:
            while index < len(changes) and changes[index][0] <= moment:
                sizes[changes[index][1]] += changes[index][2]
                index += 1
            curve.append((moment / max(1, self.end), {c: sizes[c] for c in CATEGORIES if sizes[c]}))
        return curve


def ledger_of(tracker: StepTracker, head: str = "lm_head") -> MemoryLedger:
    """Assigns a category to every block a tracker saw; `head` is the name of the model's output layer."""
    update = next((time for time, phase in tracker.marks if phase == "update"), tracker.time)
    starts = [time for time, kind, number in tracker.borders if (kind, number) == ("forward", 0)]
    blocks = [(block, _category(block, update, head, starts)) for block in tracker.blocks]
    return MemoryLedger(blocks, tracker.peak, tracker.peak_time, tracker.marks, tracker.time)


def _category(block: MemoryBlock, update: int, head: str, starts: list[int]) -> str:
    """What a backward leaves for the next micro-batch are accumulated gradients; `starts` is when each one starts."""
    if block.category:
        return block.category
    survives = block.died is None or block.died > update
    if block.phase == "backward":
        index = bisect_right(starts, block.born)
        accumulated = index < len(starts) and (block.died is None or block.died > starts[index])
        return "gradients" if survives or accumulated else "temporary"
    if block.phase != "forward":
        return "temporary"
    return "logits and loss" if block.module == head else "activations"


def wire(tracker: StepTracker) -> list[dict[str, object]]:
    """Returns every kind of collective of the step: phase, kind, ranks of its group, calls, total bytes."""
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for phase, _, collective in tracker.collectives:
        counts[phase, collective.kind, collective.ranks] += 1
        sizes[phase, collective.kind, collective.ranks] += collective.bytes
    return [
        {"phase": key[0], "kind": key[1], "ranks": len(key[2]), "group": _short(key[2]), "calls": counts[key],
         "bytes": sizes[key]}
        for key in counts
    ]  # fmt: skip


def _short(ranks: Sequence[int]) -> str:
    """Formats a group in few words: 0, 8, 16, … 504."""
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def replayed(tracker: StepTracker) -> Allocator:
    """Replays the step through a GPU's caching allocator, for its peak of allocated and of reserved memory."""
    held = [Event(n, b.size) for n, b in enumerate(tracker.blocks) if b.operator == "held" and b.size]
    held_numbers = {event.number for event in held}
    moments: list[tuple[int, Event]] = []
    for number, block in enumerate(tracker.blocks):
        if number not in held_numbers and block.size and block.died is not None:
            stream = block.category if block.category == "communication" else ""
            moments += [(block.born, Event(number, block.size, stream)), (block.died, Event(number, 0))]
    return replay(held, [event for _, event in sorted(moments, key=lambda moment: moment[0])])
