"""A rehearsed step in plain figures that can be scaled: memory where it may peak, work, calls, and what is sent.

Blocks of a model are alike, so whatever a step needs grows in a line with their number. [Note: segments] The peak does
not: it is the largest of several lines, one for each stretch of the step (the forward of the first block, the loss, the
backward of the last block, the update, …). Each stretch is followed by itself, from two rehearsals of few layers, and
the largest is taken at the number of layers that the model has. Stretches in the middle lie between those of the first
and the last block, but for what neighbours add (FSDP gathers one ahead and reduces one behind): that is seen on a
middle block, and added to both ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import DTensor

from shardwise.foresight.rehearse.ledger import CATEGORIES, ledger_of, replayed
from shardwise.foresight.rehearse.step import Rehearsal
from shardwise.foresight.rehearse.tracker import OperatorWork, StepTracker, sent

MIDDLE = "middle"
Sent = tuple[str, str, tuple[int, ...], int]  # phase, kind, ranks, bytes


@dataclass(frozen=True)
class Tally:
    """What a rank does in a step. Counts may be fractions, and negative: see `scaled`."""

    layers: int
    micro_batches: int
    held: dict[str, float]  # between steps, by category
    segments: dict[str, dict[str, float]]  # at the peak of each stretch, by category
    reserved: float
    trained: float  # parameters that this rank updates
    kept: float  # bytes that forward puts into the host's memory
    calls: dict[str, float] = field(repr=False)  # of the host, in each micro-batch
    work: dict[OperatorWork, float] = field(repr=False)  # of each micro-batch
    work_once: dict[OperatorWork, float] = field(repr=False)  # besides, of each step
    wire: dict[Sent, float] = field(repr=False)
    wire_once: dict[Sent, float] = field(repr=False)

    @property
    def peak(self) -> float:
        """Bytes at the worst moment of the step."""
        return max(sum(one.values()) for one in self.segments.values())

    @property
    def at_peak(self) -> dict[str, float]:
        """Those bytes by category."""
        return max(self.segments.values(), key=lambda one: sum(one.values()))

    @property
    def activations(self) -> float:
        """Bytes that a micro-batch leaves for its backward."""
        loss = (one for name, one in self.segments.items() if name.startswith("loss"))
        return next(loss, {}).get("activations", 0.0)

    @property
    def peak_at(self) -> str:
        """The stretch of the step that it is in."""
        return max(self.segments, key=lambda name: sum(self.segments[name].values()))


def tally_of(result: Rehearsal, layers: int) -> Tally:
    """A rehearsal's figures."""
    tracker = result.tracker
    allocator = replayed(tracker)
    each, once = _apart(tracker)
    calls = {name: count / result.micro_batches for name, count in tracker.calls.items()}
    held = {category: float(size) for category, size in result.held.items()}
    return Tally(
        layers, result.micro_batches, held, _segments(tracker, head_of(tracker)),
        float(allocator.most_reserved), _trained(tracker.model), float(tracker.to_host), calls,
        _only(each, OperatorWork), _only(once, OperatorWork), _only(each, tuple), _only(once, tuple),
    )  # fmt: skip


def _apart(tracker: StepTracker) -> tuple[Counter[Any], Counter[Any]]:
    """What every micro-batch does, and what a step does once: what is not in all of them, and the update."""
    total: Counter[Any] = Counter(tracker.work)
    total.update(sent(phase, one) for phase, _, one in tracker.collectives)
    each = tracker.passes[0] if tracker.passes else Counter()
    for one in tracker.passes[1:]:
        each = each & one
    for what, count in each.items():
        total[what] -= count * len(tracker.passes)
    return each, +total


def _only(counts: Counter[Any], kind: type) -> dict[Any, float]:
    return {what: float(count) for what, count in counts.items() if isinstance(what, kind)}


def head_of(tracker: StepTracker) -> str:
    """The name of the model's output layer."""
    model: Any = tracker.model
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "lm_head")


def _trained(model: Any) -> float:
    found = [p for p in model.parameters() if p.requires_grad]
    return float(sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in found))


def scaled(few: Tally, more: Tally, layers: int) -> Tally:
    """The same step with another number of layers, from two that were rehearsed."""
    step = (layers - more.layers) / (more.layers - few.layers)
    reached = {
        name: _along(few.segments[name], at, step, least=0.0)
        for name, at in more.segments.items()
        if name in few.segments and MIDDLE not in name
    }
    for name, at in more.segments.items():
        if MIDDLE in name:
            first, last = name.replace(MIDDLE, "first"), name.replace(MIDDLE, "last")
            between = (sum(more.segments[first].values()) + sum(more.segments[last].values())) / 2
            extra = max(0.0, sum(at.values()) - between)
            for end in (first, last):
                if end in reached:
                    reached[end] = reached[end] | {"temporary": reached[end].get("temporary", 0.0) + extra}
    peak = max(sum(one.values()) for one in reached.values())
    slack = max(few.reserved - few.peak, more.reserved - more.peak, 0.0)
    return Tally(
        layers, more.micro_batches, _along(few.held, more.held, step, 0.0), reached, peak + slack,
        more.trained + step * (more.trained - few.trained), more.kept + step * (more.kept - few.kept),
        *(_along(getattr(few, name), getattr(more, name), step)
          for name in ("calls", "work", "work_once", "wire", "wire_once")),
    )  # fmt: skip


def _along(few: dict[Any, float], more: dict[Any, float], step: float, least: float | None = None) -> dict[Any, float]:
    found = {}
    for key in few.keys() | more.keys():
        value = more.get(key, 0.0) + step * (more.get(key, 0.0) - few.get(key, 0.0))
        found[key] = value if least is None else max(least, value)
    return found


def _segments(tracker: StepTracker, head: str) -> dict[str, dict[str, float]]:
    """By stretch of the step, what there is of each category when it has most."""
    borders = _borders(tracker)
    changes: list[tuple[int, str, int]] = []
    now: Counter[str] = Counter()
    for block, category in ledger_of(tracker, head).blocks:
        if block.operator == "held" and block.phase == "load":
            now[category] += block.size
        else:
            changes.append((block.born, category, block.size))
        if block.died is not None:
            changes.append((block.died, category, -block.size))
    changes.sort(key=lambda change: change[0])
    found: dict[str, dict[str, float]] = {}
    total, at, name = sum(now.values()), 0, "start"
    most: dict[str, int] = {}
    for time, category, size in changes:
        while at < len(borders) and borders[at][0] <= time:
            name, at = borders[at][1], at + 1
        now[category] += size
        total += size
        if total > most.get(name, -1):
            most[name], found[name] = total, {c: float(now[c]) for c in CATEGORIES if now[c]}
    return found


def _borders(tracker: StepTracker) -> list[tuple[int, str]]:
    """When each stretch begins, with its name."""
    last = max((number for _, _, number in tracker.borders), default=0)
    micro, found = 0, []
    marks = [(time, phase, -1) for time, phase in tracker.marks if phase == "update"]
    for time, kind, number in sorted(tracker.borders + marks, key=lambda one: one[0]):
        if kind == "loss" and number < last:
            continue  # on the way to the next block
        place = "first" if number == 0 else "last" if number == last else MIDDLE
        which = "first" if micro == 0 else "further"
        if kind == "update":
            found.append((time, "update"))
        else:
            found.append((time, f"{kind}, {place} block, {which} micro-batch" if kind in ("forward", "backward")
                          else f"{kind}, {which} micro-batch"))  # fmt: skip
        micro += kind == "end"
    return found
