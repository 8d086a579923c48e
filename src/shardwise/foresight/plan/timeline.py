"""One step as a picture: what computes and what is sent, in lanes; of a pipeline, every stage and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.foresight.plan.charts import TIME, legend, seconds, text
from shardwise.foresight.plan.estimate import Estimate

MOST_STAGES, MOST_BATCHES = 16, 32
SLICES = 96  # of all passes of a step together: exchange along the model's axes is drawn between them
WIDTH, LEFT = 1160, 128


@dataclass(frozen=True)
class Box:
    """Something that goes on in a lane from one second to another."""

    lane: int
    begin: float
    end: float
    kind: str
    name: str


def lanes(found: Estimate, layers: int) -> str:
    """Computation, communication and offload of one rank."""
    boxes = _step(found, layers)
    names = ["computation", "model axes", "data axis", "host and disk"]
    used = [n for n in range(len(names)) if any(box.lane == n for box in boxes)]
    end = max([1e-9, *(box.end for box in boxes)])
    shapes = []
    for at, lane in enumerate(used):
        y = 8 + at * 38
        shapes.append(f'<text class="lane" x="{LEFT - 10}" y="{y + 19}" text-anchor="end">{names[lane]}</text>')
        shapes.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 8}" height="28"/>')
        shapes += [_drawn(box, y, 28, end) for box in boxes if box.lane == lane]
    bottom = 8 + len(used) * 38
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = LEFT + share * (WIDTH - LEFT - 8)
        anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
        place = f'x="{x:.0f}" y="{bottom + 12}" text-anchor="{anchor}"'
        shapes.append(f'<text class="tick" {place}>{seconds(share * end) if share else "0 s"}</text>')
    spent: dict[str, float] = {}
    for box in boxes:
        spent[box.kind] = spent.get(box.kind, 0.0) + box.end - box.begin
    kinds = {kind for kind, time in spent.items() if time > 0.001 * end}  # what can be seen
    keys = legend(
        [(kind, name) for kind, name in TIME.values() if kind in kinds]
        + ([("t6 soft", "ZeRO, beside the computation")] if "t6 soft" in kinds else [])
    )
    label = f"one step of {seconds(end)}"
    return f'{keys}<svg viewBox="0 0 {WIDTH} {bottom + 20}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _drawn(box: Box, y: float, tall: float, end: float) -> str:
    scale = (WIDTH - LEFT - 8) / end
    x, wide = LEFT + box.begin * scale, (box.end - box.begin) * scale
    if wide < 0.05:
        return ""
    title = f"{box.name}: {seconds(box.end - box.begin)}"
    gap = 0.5 if wide > 3 else 0.0
    return (
        f'<rect class="{box.kind}" x="{x + gap / 2:.2f}" y="{y}" width="{wide - gap:.2f}" height="{tall}">'
        f"<title>{text(title)}</title></rect>"
    )


def _step(found: Estimate, layers: int) -> list[Box]:
    """The parts of the step time in the order in which they come; sums are exact, places within a pass are drawn."""
    time, count = found.time, min(found.micro_batches, MOST_BATCHES)
    zero = found.run.parallel.zero
    boxes: list[Box] = []
    now = 0.0

    def put(lane: int, spent: float, kind: str, name: str) -> None:
        nonlocal now
        if spent > 0:
            boxes.append(Box(lane, now, now + spent, kind, name))
            now += spent

    passes = [(time.forward, "t1", "forward", zero == 3), (time.backward, "t2", "backward", True)]
    total = time.forward + time.backward or 1.0
    room = sum(spent for spent, _, _, beside in passes if beside) or 1.0
    slices = max(1, min(layers, SLICES // (2 * count)))
    put(0, time.bubble / 2, "t8", "idle until the first micro-batch arrives")
    put(2, time.data_axis / 2, "t6", "first gather, and what gathers take from the computation")
    for number in range(count):
        for spent, kind, name, beside in passes:
            share = spent / total / count
            begin = now
            each, exchange = spent / count / slices, time.model_axes * share / slices
            for _ in range(slices if exchange else 1):
                put(0, each if exchange else spent / count, kind, f"{name} of micro-batch {number + 1}")
                put(1, exchange, "t5", "exchange along tensor, context, expert or pipeline")
            if beside and time.hidden and (zero >= 2 or number == count - 1):
                times = count if zero >= 2 else 1
                part = min(now - begin, time.hidden * spent / room / times) / slices
                for at in range(slices):
                    start = begin + at * (now - begin) / slices
                    boxes.append(
                        Box(2, start, start + part, "t6 soft", "gathers and reductions beside the computation")
                    )
            put(0, time.waiting * share, "t4", "the host asks for kernels more slowly than they run")
    put(2, time.data_axis / 2, "t6", "last reduction")
    put(0, time.bubble / 2, "t8", "idle until the last stage is done")
    put(3, time.offload, "t7", "states and weights to and from the host or disk")
    put(0, time.update, "t3", "update")
    return boxes


def pipeline(found: Estimate) -> tuple[str, str]:
    """All stages over a step, and a sentence about the picture."""
    parallel, time = found.run.parallel, found.time
    stages, count = min(parallel.pipeline, MOST_STAGES), min(found.micro_batches, MOST_BATCHES)
    chunks = (parallel.virtual_stages or 2) if parallel.pipeline_schedule == "interleaved" else 1
    inner = time.waiting + time.model_axes
    total = time.forward + time.backward or 1.0
    forward = (time.forward + inner * time.forward / total) / found.micro_batches
    backward = (time.backward + inner * time.backward / total) / found.micro_batches
    boxes = schedule(stages, count, chunks, forward, backward)
    end = max(box.end for box in boxes)
    tall = 26 if stages <= 8 else 20
    shapes = []
    for stage in range(stages):
        y = 6 + stage * (tall + 4)
        place = f'x="{LEFT - 10}" y="{y + tall - 8}" text-anchor="end"'
        shapes.append(f'<text class="lane" {place}>stage {stage + 1}</text>')
        place = f'x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 8}" height="{tall}"'
        shapes.append(f'<rect class="t8" {place}><title>idle</title></rect>')
        for box in boxes:
            if box.lane == stage:
                shapes.append(_drawn(box, y, tall, end))
                x, wide = _place(box, end)
                number = box.name.split()[-1]
                if wide > 9 * len(number):
                    shapes.append(f'<text class="batch" x="{x + wide / 2:.1f}" y="{y + tall / 2 + 4}">{number}</text>')
    high = 10 + stages * (tall + 4)
    keys = legend([("t1", "forward"), ("t2", "backward"), ("t8", "idle")])
    label = 'role="img" aria-label="stages of the pipeline"'
    svg = f'{keys}<svg viewBox="0 0 {WIDTH} {high}" {label}>{"".join(shapes)}</svg>'
    idle = 1 - count * (forward + backward) / end
    drawn = "interleaved" if len(boxes) > 2 * stages * count else "1f1b"
    words = f"{drawn}: {stages} stages, {count} micro-batches, {idle:.0%} idle as drawn"
    if stages < parallel.pipeline or count < found.micro_batches:
        words += f" (cut: it has {parallel.pipeline} stages and {found.micro_batches} micro-batches a step)"
    return svg, f"{words}. Numbers are micro-batches; exchange and waiting are part of each box."


def _place(box: Box, end: float) -> tuple[float, float]:
    scale = (WIDTH - LEFT - 8) / end
    return LEFT + box.begin * scale, (box.end - box.begin) * scale


def schedule(stages: int, count: int, chunks: int, forward: float, backward: float) -> list[Box]:
    """1F1B, or interleaved with several chunks of blocks per stage; each pass begins when what it needs is there."""
    orders = [_order(stage, stages, count, chunks) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}  # pass, chunk of the whole model, micro-batch
    free = [0.0] * stages
    boxes: list[Box] = []
    while any(orders):
        moved = False
        for stage, order in enumerate(orders):
            while order:
                way, chunk, batch = order[0]
                place = chunk * stages + stage
                last = stages * chunks - 1
                if way == "F":
                    needs = ("F", place - 1, batch) if place else None
                else:
                    needs = ("B", place + 1, batch) if place < last else ("F", place, batch)
                if needs is not None and needs not in done:
                    break
                begin = max(free[stage], done[needs] if needs else 0.0)
                end = begin + (forward if way == "F" else backward) / chunks
                done[way, place, batch] = free[stage] = end
                name = f"{'forward' if way == 'F' else 'backward'} of micro-batch {batch + 1}"
                boxes.append(Box(stage, begin, end, "t1" if way == "F" else "t2", name))
                order.pop(0)
                moved = True
        if not moved:  # a last group that the stages do not divide: an order that always works
            return schedule(stages, count, 1, forward, backward)
    return boxes


def _order(stage: int, stages: int, count: int, chunks: int) -> list[tuple[str, int, int]]:
    """What a stage does, in order: forward or backward, its chunk, the micro-batch."""
    groups = [range(at, min(at + stages, count)) for at in range(0, count, stages)] if chunks > 1 else [range(count)]
    ahead = [("F", chunk, batch) for group in groups for chunk in range(chunks) for batch in group]
    back = [("B", chunk, batch) for group in groups for chunk in reversed(range(chunks)) for batch in group]
    warm = stages - stage - 1
    if chunks > 1:
        warm = 2 * warm + (chunks - 1) * stages
    warm = min(warm, len(ahead))
    order = ahead[:warm]
    for at in range(len(ahead) - warm):
        order += [ahead[warm + at], back[at]]
    return order + back[len(ahead) - warm :]
