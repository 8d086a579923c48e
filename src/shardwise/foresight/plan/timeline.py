"""One step as a picture: computation and communication in lanes; for a pipeline, every stage and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.foresight.plan.charts import TIME, legend, seconds, text
from shardwise.foresight.plan.estimate import Estimate
from shardwise.parallel.pipeline.schedule import Action, Kind, Schedule, schedule_of, simulate

MOST_STAGES, MOST_BATCHES = 16, 32
SLICES = 96  # of all passes of a step together: exchange along the model's axes is drawn between them
WIDTH, LEFT = 1160, 128
PASSES: dict[Kind, str] = {
    "forward": "forward", "backward": "backward", "input": "backward (inputs)", "weight": "backward (weights)",
}  # fmt: skip


@dataclass(frozen=True)
class Box:
    """A bar in a lane of the timeline, from one second to another."""

    lane: int
    begin: float
    end: float
    kind: str
    name: str


def lanes(estimate: Estimate, layers: int) -> str:
    """Returns an SVG of computation, communication and offload of one rank."""
    boxes = _step(estimate, layers)
    names = ["computation", "model axes", "data axis", "host and disk"]
    used = sorted({box.lane for box in boxes})
    end = max([1e-9, *(box.end for box in boxes)])
    shapes = []
    for index, lane in enumerate(used):
        y = 8 + index * 38
        shapes.append(f'<text class="lane" x="{LEFT - 10}" y="{y + 19}" text-anchor="end">{names[lane]}</text>')
        shapes.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 8}" height="28"/>')
        shapes += [_draw(box, y, 28, end) for box in boxes if box.lane == lane]
    bottom = 8 + len(used) * 38
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = LEFT + share * (WIDTH - LEFT - 8)
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        position = f'x="{x:.0f}" y="{bottom + 12}" text-anchor="{anchor}"'
        shapes.append(f'<text class="tick" {position}>{seconds(share * end) if share else "0 s"}</text>')
    kind_seconds: dict[str, float] = {}
    for box in boxes:
        kind_seconds[box.kind] = kind_seconds.get(box.kind, 0.0) + box.end - box.begin
    kinds = {kind for kind, time in kind_seconds.items() if time > 0.001 * end}  # what can be seen
    keys = legend(
        [(kind, name) for kind, name in TIME.values() if kind in kinds]
        + ([("t6 soft", "ZeRO, beside the computation")] if "t6 soft" in kinds else [])
    )
    label = f"one step of {seconds(end)}"
    return f'{keys}<svg viewBox="0 0 {WIDTH} {bottom + 20}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _draw(box: Box, y: float, height: float, end: float) -> str:
    scale = (WIDTH - LEFT - 8) / end
    x = LEFT + box.begin * scale
    width = (box.end - box.begin) * scale
    if width < 0.05:
        return ""
    title = f"{box.name}: {seconds(box.end - box.begin)}"
    gap = 0.5 if width > 3 else 0.0
    return (
        f'<rect class="{box.kind}" x="{x + gap / 2:.2f}" y="{y}" width="{width - gap:.2f}" height="{height}">'
        f"<title>{text(title)}</title></rect>"
    )


def _step(estimate: Estimate, layers: int) -> list[Box]:
    """The parts of the step time in order; totals are exact, positions within a pass are schematic."""
    time = estimate.time
    count = min(estimate.micro_batches, MOST_BATCHES)
    zero = estimate.run.parallel.zero
    boxes: list[Box] = []
    clock = 0.0

    def add(lane: int, spent: float, kind: str, name: str) -> None:
        nonlocal clock
        if spent > 0:
            boxes.append(Box(lane, clock, clock + spent, kind, name))
            clock += spent

    passes = [(time.forward, "t1", "forward", zero == 3), (time.backward, "t2", "backward", True)]
    total = time.forward + time.backward or 1.0
    overlappable = sum(spent for spent, _, _, overlaps in passes if overlaps) or 1.0
    slices = max(1, min(layers, SLICES // (2 * count)))
    add(0, time.bubble / 2, "t8", "idle until the first micro-batch arrives")
    add(2, time.data_axis / 2, "t6", "first gather, and what gathers take from the computation")
    for number in range(count):
        for spent, kind, name, overlaps in passes:
            share = spent / total / count
            begin = clock
            slice_seconds = spent / count / slices
            exchange = time.model_axes * share / slices
            for _ in range(slices if exchange else 1):
                add(0, slice_seconds if exchange else spent / count, kind, f"{name} of micro-batch {number + 1}")
                add(1, exchange, "t5", "exchange along tensor, context, expert or pipeline")
            if overlaps and time.hidden and (zero >= 2 or number == count - 1):
                times = count if zero >= 2 else 1
                part = min(clock - begin, time.hidden * spent / overlappable / times) / slices
                for at in range(slices):
                    start = begin + at * (clock - begin) / slices
                    boxes.append(
                        Box(2, start, start + part, "t6 soft", "gathers and reductions beside the computation")
                    )
            add(0, time.waiting * share, "t4", "the host asks for kernels more slowly than they run")
    add(2, time.data_axis / 2, "t6", "last reduction")
    add(0, time.bubble / 2, "t8", "idle until the last stage is done")
    add(3, time.offload, "t7", "states and weights to and from the host or disk")
    add(0, time.update, "t3", "update")
    return boxes


def pipeline(estimate: Estimate) -> tuple[str, str]:
    """Returns an SVG of all stages over a step, and its caption."""
    parallel = estimate.run.parallel
    time = estimate.time
    stages = min(parallel.pipeline, MOST_STAGES)
    count = min(estimate.micro_batches, MOST_BATCHES)
    exposed = time.waiting + time.model_axes
    total = time.forward + time.backward or 1.0
    forward = (time.forward + exposed * time.forward / total) / estimate.micro_batches
    backward = (time.backward + exposed * time.backward / total) / estimate.micro_batches
    boxes = passes(schedule_of(parallel), stages, count, forward, backward)
    end = max(box.end for box in boxes)
    height = 26 if stages <= 8 else 20
    shapes = []
    for stage in range(stages):
        y = 6 + stage * (height + 4)
        position = f'x="{LEFT - 10}" y="{y + height - 8}" text-anchor="end"'
        shapes.append(f'<text class="lane" {position}>stage {stage + 1}</text>')
        position = f'x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 8}" height="{height}"'
        shapes.append(f'<rect class="t8" {position}><title>idle</title></rect>')
        for box in boxes:
            if box.lane == stage:
                shapes.append(_draw(box, y, height, end))
                x, wide = _place(box, end)
                number = box.name.split()[-1]
                if wide > 9 * len(number):
                    shapes.append(
                        f'<text class="batch" x="{x + wide / 2:.1f}" y="{y + height / 2 + 4}">{number}</text>'
                    )
    total_height = 10 + stages * (height + 4)
    keys = legend([("t1", "forward"), ("t2", "backward"), ("t8", "idle")])
    label = 'role="img" aria-label="stages of the pipeline"'
    svg = f'{keys}<svg viewBox="0 0 {WIDTH} {total_height}" {label}>{"".join(shapes)}</svg>'
    idle = 1 - count * (forward + backward) / end
    caption = f"{parallel.pipeline_schedule}: {stages} stages, {count} micro-batches, {idle:.0%} idle as drawn"
    if stages < parallel.pipeline or count < estimate.micro_batches:
        caption += f" (cut: it has {parallel.pipeline} stages and {estimate.micro_batches} micro-batches a step)"
    return svg, f"{caption}. Numbers are micro-batches; exchange and waiting are part of each box."


def passes(schedule: Schedule, stages: int, count: int, forward: float, backward: float) -> list[Box]:
    """Returns the boxes of every stage's passes, each as early as its inputs are available."""
    backward_share = 0.5 if schedule.splits else 1.0
    boxes = []

    def duration(action: Action) -> float:
        return (forward if action.kind == "forward" else backward * backward_share) / schedule.chunks

    for span in simulate(schedule, stages, count, duration):
        color = "t1" if span.action.kind == "forward" else "t2"
        name = f"{PASSES[span.action.kind]} of micro-batch {span.action.micro + 1}"
        boxes.append(Box(span.rank, span.begin, span.end, color, name))
    return boxes


def _place(box: Box, end: float) -> tuple[float, float]:
    scale = (WIDTH - LEFT - 8) / end
    return LEFT + box.begin * scale, (box.end - box.begin) * scale
