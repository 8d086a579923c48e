"""A rehearsed step in figures that can be scaled: memory where it may peak, work, calls, and communication.

Blocks of a model are alike, so whatever a step needs is linear in their number. [Note: segments] The peak is not: it is
the maximum of several linear functions, one for each segment of the step (the forward of the first block, the loss, the
backward of the last block, the update, …). Each segment is extrapolated by itself from two rehearsals of few layers,
and the maximum is taken at the number of layers of the model. Segments in the middle lie between those of the first and
the last block, except for what neighbours add (FSDP prefetches one block and reduces one behind): that is observed on a
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
    """Figures of a rank's step. Counts may be fractional and negative: see `scaled`."""

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
        """Peak bytes of the step."""
        return max(sum(segment.values()) for segment in self.segments.values())

    @property
    def at_peak(self) -> dict[str, float]:
        """Bytes by category at the peak."""
        return max(self.segments.values(), key=lambda segment: sum(segment.values()))

    @property
    def activations(self) -> float:
        """Bytes that a micro-batch saves for its backward."""
        loss = (segment for name, segment in self.segments.items() if name.startswith("loss"))
        return next(loss, {}).get("activations", 0.0)

    @property
    def peak_at(self) -> str:
        """Name of the segment that has the peak."""
        return max(self.segments, key=lambda name: sum(self.segments[name].values()))


def tally_of(result: Rehearsal, layers: int) -> Tally:
    """Returns the figures of a rehearsal."""
    tracker = result.tracker
    allocator = replayed(tracker)
    per_micro_batch, per_step = _per_micro_batch_and_step(tracker)
    calls = {name: count / result.micro_batches for name, count in tracker.calls.items()}
    held = {category: float(size) for category, size in result.held.items()}
    return Tally(
        layers, result.micro_batches, held, _segments(tracker, head_of(tracker)),
        float(allocator.most_reserved), _trained(tracker.model), float(tracker.to_host), calls,
        _only(per_micro_batch, OperatorWork), _only(per_step, OperatorWork),
        _only(per_micro_batch, tuple), _only(per_step, tuple),
    )  # fmt: skip


def _per_micro_batch_and_step(tracker: StepTracker) -> tuple[Counter[Any], Counter[Any]]:
    """Work of every micro-batch, and work once per step: what not all micro-batches do, and the update."""
    total: Counter[Any] = Counter(tracker.work)
    total.update(sent(phase, collective) for phase, _, collective in tracker.collectives)
    common = tracker.passes[0] if tracker.passes else Counter()
    for current in tracker.passes[1:]:
        common = common & current
    for key, count in common.items():
        total[key] -= count * len(tracker.passes)
    return common, +total


def _only(counts: Counter[Any], kind: type) -> dict[Any, float]:
    return {key: float(count) for key, count in counts.items() if isinstance(key, kind)}


def head_of(tracker: StepTracker) -> str:
    """Returns the name of the model's output layer."""
    model: Any = tracker.model
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "lm_head")


def _trained(model: Any) -> float:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return float(sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in trainable))


def scaled(shallow: Tally, deep: Tally, layers: int) -> Tally:
    """Extrapolates the step to another number of layers, from two rehearsals."""
    step = (layers - deep.layers) / (deep.layers - shallow.layers)
    segments = {
        name: _extrapolate(shallow.segments[name], sizes, step, minimum=0.0)
        for name, sizes in deep.segments.items()
        if name in shallow.segments and MIDDLE not in name
    }
    for name, sizes in deep.segments.items():
        if MIDDLE in name:
            first = name.replace(MIDDLE, "first")
            last = name.replace(MIDDLE, "last")
            mean = (sum(deep.segments[first].values()) + sum(deep.segments[last].values())) / 2
            extra = max(0.0, sum(sizes.values()) - mean)
            for end in (first, last):
                if end in segments:
                    segments[end] = segments[end] | {"temporary": segments[end].get("temporary", 0.0) + extra}
    peak = max(sum(segment.values()) for segment in segments.values())
    slack = max(shallow.reserved - shallow.peak, deep.reserved - deep.peak, 0.0)
    return Tally(
        layers, deep.micro_batches, _extrapolate(shallow.held, deep.held, step, 0.0), segments, peak + slack,
        deep.trained + step * (deep.trained - shallow.trained), deep.kept + step * (deep.kept - shallow.kept),
        *(_extrapolate(getattr(shallow, name), getattr(deep, name), step)
          for name in ("calls", "work", "work_once", "wire", "wire_once")),
    )  # fmt: skip


def _extrapolate(
    shallow: dict[Any, float], deep: dict[Any, float], step: float, minimum: float | None = None
) -> dict[Any, float]:
    extrapolated = {}
    for key in shallow.keys() | deep.keys():
        value = deep.get(key, 0.0) + step * (deep.get(key, 0.0) - shallow.get(key, 0.0))
        extrapolated[key] = value if minimum is None else max(minimum, value)
    return extrapolated


def _segments(tracker: StepTracker, head: str) -> dict[str, dict[str, float]]:
    """Bytes by category at the peak of each segment of the step."""
    borders = _borders(tracker)
    changes: list[tuple[int, str, int]] = []
    sizes: Counter[str] = Counter()
    for block, category in ledger_of(tracker, head).blocks:
        if block.operator == "held" and block.phase == "load":
            sizes[category] += block.size
        else:
            changes.append((block.born, category, block.size))
        if block.died is not None:
            changes.append((block.died, category, -block.size))
    changes.sort(key=lambda change: change[0])
    segments: dict[str, dict[str, float]] = {}
    total = sum(sizes.values())
    index = 0
    name = "start"
    peaks: dict[str, int] = {}
    for time, category, size in changes:
        while index < len(borders) and borders[index][0] <= time:
            name = borders[index][1]
            index = index + 1
        sizes[category] += size
        total += size
        if total > peaks.get(name, -1):
            peaks[name], segments[name] = total, {c: float(sizes[c]) for c in CATEGORIES if sizes[c]}
    return segments


def _borders(tracker: StepTracker) -> list[tuple[int, str]]:
    """Start time and name of each segment."""
    last = max((number for _, _, number in tracker.borders), default=0)
    micro = 0
    starts = []
    marks = [(time, phase, -1) for time, phase in tracker.marks if phase == "update"]
    for time, kind, number in sorted(tracker.borders + marks, key=lambda border: border[0]):
        if kind == "loss" and number < last:
            continue  # on the way to the next block
        position = MIDDLE
        if number == 0:
            position = "first"
        elif number == last:
            position = "last"
        which = "first" if micro == 0 else "further"
        if kind == "update":
            starts.append((time, "update"))
        else:
            starts.append((time, f"{kind}, {position} block, {which} micro-batch" if kind in ("forward", "backward")
                          else f"{kind}, {which} micro-batch"))  # fmt: skip
        micro += kind == "end"
    return starts
