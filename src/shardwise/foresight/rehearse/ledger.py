"""A rehearsed step's memory by what it is for: at its peak, and over the step.

What a block of memory is for is known when the step is over: what backward made and left behind are gradients, what
forward made and backward freed are activations.
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
    """The blocks of a step, each with its category."""

    blocks: list[tuple[MemoryBlock, str]]
    peak: int
    peak_time: int
    phases: list[tuple[int, str]]
    end: int

    def at(self, moment: int) -> dict[str, int]:
        """Bytes by category at a moment."""
        found: Counter[str] = Counter()
        for block, category in self.blocks:
            if block.born < moment and (block.died is None or block.died > moment):
                found[category] += block.size
        return {c: found[c] for c in CATEGORIES if found[c]}

    def at_peak(self) -> dict[str, int]:
        """Bytes by category when most is there."""
        return self.at(self.peak_time)

    def largest(self, count: int = 10) -> list[tuple[str, str, str, int]]:
        """What takes most at the peak, by module: category, module, operator, bytes."""
        found: Counter[tuple[str, str, str]] = Counter()
        for block, category in self.blocks:
            if block.born < self.peak_time and (block.died is None or block.died > self.peak_time):
                found[category, block.module, block.operator] += block.size
        return [(*key, size) for key, size in found.most_common(count)]

    def curve(self, points: int = POINTS) -> list[tuple[float, dict[str, int]]]:
        """Memory over the step: share of it that has passed, and bytes by category."""
        moments = [round(self.end * i / points) for i in range(points + 1)]
        changes: list[tuple[int, str, int]] = []
        for block, category in self.blocks:
            changes.append((block.born, category, block.size))
            if block.died is not None:
                changes.append((block.died, category, -block.size))
        changes.sort(key=lambda change: change[0])
        now: Counter[str] = Counter()
        found, at = [], 0
        for moment in moments:
            while at < len(changes) and changes[at][0] <= moment:
                now[changes[at][1]] += changes[at][2]
                at += 1
            found.append((moment / max(1, self.end), {c: now[c] for c in CATEGORIES if now[c]}))
        return found


def ledger_of(tracker: StepTracker, head: str = "lm_head") -> MemoryLedger:
    """Sorts what a tracker saw; `head` is the name of the model's output layer."""
    update = next((time for time, phase in tracker.marks if phase == "update"), tracker.time)
    begun = [time for time, kind, number in tracker.borders if (kind, number) == ("forward", 0)]
    blocks = [(block, _category(block, update, head, begun)) for block in tracker.blocks]
    return MemoryLedger(blocks, tracker.peak, tracker.peak_time, tracker.marks, tracker.time)


def _category(block: MemoryBlock, update: int, head: str, begun: list[int]) -> str:
    """`begun` is when each micro-batch did: what a backward leaves for the next one are sums of gradients."""
    if block.category:
        return block.category
    lasts = block.died is None or block.died > update
    if block.phase == "backward":
        after = bisect_right(begun, block.born)
        summed = after < len(begun) and (block.died is None or block.died > begun[after])
        return "gradients" if lasts or summed else "temporary"
    if block.phase != "forward":
        return "temporary"
    return "logits and loss" if block.module == head else "activations"


def wire(tracker: StepTracker) -> list[dict[str, object]]:
    """Every kind of collective of the step: phase, kind, ranks of its group, how often, bytes in all."""
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for phase, _, one in tracker.collectives:
        counts[phase, one.kind, one.ranks] += 1
        sizes[phase, one.kind, one.ranks] += one.bytes
    return [
        {"phase": key[0], "kind": key[1], "ranks": len(key[2]), "group": _short(key[2]), "calls": counts[key],
         "bytes": sizes[key]}
        for key in counts
    ]  # fmt: skip


def _short(ranks: Sequence[int]) -> str:
    """0, 8, 16, … 504: a group in few words."""
    if len(ranks) <= 4:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"


def replayed(tracker: StepTracker) -> Allocator:
    """The step through a GPU's allocator: what it hands out at most, and what it keeps of the device."""
    held = [Event(n, b.size) for n, b in enumerate(tracker.blocks) if b.operator == "held" and b.size]
    known = {event.number for event in held}
    moments: list[tuple[int, Event]] = []
    for number, block in enumerate(tracker.blocks):
        if number not in known and block.size and block.died is not None:
            stream = block.category if block.category == "communication" else ""
            moments += [(block.born, Event(number, block.size, stream)), (block.died, Event(number, 0))]
    return replay(held, [event for _, event in sorted(moments, key=lambda moment: moment[0])])
