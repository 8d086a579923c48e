"""Charts of the plan report: stacked bars, legends and memory over a step. Colours mean the same in every chart.

Bars are boxes with widths in per cent, so that they fit a phone, a projector and paper with their labels at full size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

from shardwise.core.printable import one_line

GIB = 2**30
MEMORY = {
    "parameters": "m1", "quantised base": "m2", "buffers": "m3", "optimizer": "m4", "gradients": "m5", "gathered": "m6",
    "communication": "m7", "activations": "m8", "logits and loss": "m9", "temporary": "m10", "workspace": "m11",
}  # fmt: skip
TIME = {
    "forward": ("t1", "forward"), "backward": ("t2", "backward"), "update": ("t3", "update"),
    "waiting": ("t4", "waiting for the host"), "model_axes": ("t5", "tensor, context, expert, stages"),
    "data_axis": ("t6", "ZeRO, not hidden"), "offload": ("t7", "offload"), "bubble": ("t8", "pipeline idle"),
}  # fmt: skip
MEMORY_ROOM, TIME_ROOM = 2.0, 2.2  # per cent of a track that a letter of a label needs; tracks of time are shorter


def text(value: object) -> str:
    """Returns `value` escaped for HTML, on one line and without control characters."""
    return escape(one_line(value))


def gib(size: float) -> str:
    """Formats a number of bytes in GiB for a label."""
    size /= GIB
    if abs(size) >= 100:
        return f"{size:,.0f}"
    return f"{size:.1f}" if abs(size) >= 0.95 else f"{size:.2f}"


def seconds(spent: float) -> str:
    """Formats a duration with three significant digits."""
    if spent >= 100:
        return f"{spent:,.0f} s"
    return f"{spent:.2f} s" if spent >= 0.1 else f"{spent * 1000:.3g} ms"


@dataclass(frozen=True)
class BarRow:
    """One row of the bar chart: bytes and seconds by category, with the labels beside them."""

    name: str
    memory: Mapping[str, float]
    time: Mapping[str, float]
    fits: bool = True
    note: str = ""
    mark: str = ""
    memory_change: str = ""
    time_change: str = ""


def bars(rows: Sequence[BarRow], limit: float, approximate: bool = False) -> str:
    """Returns the HTML of a bar chart with memory and time of each row side by side, on common scales."""
    assert all(name in MEMORY for row in rows for name in row.memory), "a category without a colour"
    largest = max([limit * 1.08, *(sum(row.memory.values()) * 1.01 for row in rows)])
    longest = max([1e-9, *(sum(row.time.values()) * 1.01 for row in rows)])
    memory_kinds = {name for row in rows for name, size in row.memory.items() if size >= 0.002 * largest}
    time_kinds = {name for row in rows for name, part in row.time.items() if part >= 0.002 * longest}
    sign = "≈ " if approximate else ""
    limit_percent = 100 * limit / largest
    label_side = "middle"
    if limit_percent < 18:
        label_side = "left"
    elif limit_percent > 82:
        label_side = "right"
    body = [
        '<div class="row heads"><span></span><span class="axis-title">memory of a device, GiB'
        f'<i class="limit-name {label_side}" style="left:{limit_percent:.2f}%">limit {gib(limit)}</i></span>'
        "<span></span>"
        '<span class="axis-title">time of a step</span><span></span></div>'
    ]
    for row in rows:
        total = sum(row.memory.values())
        step = sum(row.time.values())
        sizes = ((kind, n, row.memory.get(n, 0.0)) for n, kind in MEMORY.items())
        memory = _parts(
            ((kind, n, s, f"{gib(s)} GiB", gib(s)) for kind, n, s in sizes), largest, MEMORY_ROOM, limit_percent
        )
        time = _parts(
            ((*TIME.get(n, ("t0", n)), s, seconds(s), seconds(s)) for n, s in row.time.items()), longest, TIME_ROOM
        )
        over_class = "" if row.fits else " over"
        warning = "" if row.fits else '<em class="bad">does not fit</em>'
        star = f'<b class="star">{text(row.mark)}</b>' if row.mark else ""
        note = f"<small>{text(row.note)}</small>" if row.note else ""
        body.append(
            f'<div class="row"><span class="name">{text(row.name)} {star}{note}</span>'
            f'<span class="track{over_class}">{memory}<i class="limit" style="left:{limit_percent:.2f}%"></i></span>'
            f'<span class="total">{sign}{gib(total)} GiB{_small(row.memory_change)}{warning}</span>'
            f'<span class="track">{time}</span>'
            f'<span class="total">{sign}{seconds(step)}{_small(row.time_change)}</span></div>'
        )
    keys = legend((MEMORY[n], n) for n in MEMORY if n in memory_kinds)
    times = legend(TIME[n] for n in TIME if n in time_kinds) if len(time_kinds) > 1 else ""
    return f'<div class="legends">{keys}{times}</div><div class="bars">{"".join(body)}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Returns the HTML of a legend from pairs of CSS class and name."""
    keys = "".join(f'<span><i class="{kind}"></i>{text(name)}</span>' for kind, name in entries)
    return f'<p class="legend">{keys}</p>'


def _small(change: str) -> str:
    return f"<small>{text(change)}</small>" if change else ""


def _parts(
    parts: Iterable[tuple[str, str, float, str, str]], total: float, letter_width: float, limit_percent: float = -99.0
) -> str:
    """Boxes with labels where they fit; no label where the limit's line would cross it."""
    boxes = []
    start = 0.0
    for kind, name, size, title, label in parts:
        width = 100 * size / total
        if width < 0.05:
            continue
        label_width = letter_width * len(label)
        crossed = abs(start + width / 2 - limit_percent) < label_width / 2
        start += width
        shown_label = label if width >= label_width and not crossed else ""
        boxes.append(f'<i class="{kind}" style="width:{width:.3f}%" title="{text(name)}: {title}">{shown_label}</i>')
    return "".join(boxes)


def area(
    curve: Sequence[tuple[float, Mapping[str, int]]], phases: Sequence[tuple[float, str]], limit: float, title: str
) -> str:
    """Returns an SVG of the memory over a step, stacked by category, with the phases named above."""
    width = 1160
    height = 320
    left_margin = 56
    top = 30
    bottom = 290
    present = {name for _, sizes in curve for name, size in sizes.items() if size}
    names = [name for name in MEMORY if name in present]
    peak = max(sum(at.values()) for _, at in curve) or 1
    scale_top = limit * 1.05 if limit <= 1.5 * peak else peak * 1.06
    x = lambda share: left_margin + share * (width - left_margin - 8)  # noqa: E731
    y = lambda size: bottom - size / scale_top * (bottom - top)  # noqa: E731
    shapes = []
    below = [0.0] * len(curve)
    for name in names:
        above = [low + at.get(name, 0) for low, (_, at) in zip(below, curve, strict=True)]
        upper_edge = [f"{x(share):.1f},{y(size):.1f}" for (share, _), size in zip(curve, above, strict=True)]
        lower_edge = [f"{x(share):.1f},{y(size):.1f}" for (share, _), size in zip(curve, below, strict=True)]
        points = " ".join(upper_edge + lower_edge[::-1])
        shapes.append(f'<polygon class="{MEMORY[name]}" points="{points}"><title>{text(name)}</title></polygon>')
        below = above
    for value in ticks(scale_top):
        shapes.append(
            f'<line class="grid" x1="{left_margin}" x2="{width - 8}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
            f'<text class="tick" x="{left_margin - 8}" y="{y(value) + 4:.1f}" text-anchor="end">'
            f"{value / GIB:.3g}</text>"
        )
    ends = [share for share, _ in phases[1:]] + [1.0]
    for (share, name), end in zip(phases, ends, strict=True):
        shapes.append(f'<line class="phase" x1="{x(share):.1f}" x2="{x(share):.1f}" y1="{top - 14}" y2="{bottom}"/>')
        if x(end) - x(share) > 8 * len(name):
            shapes.append(f'<text class="tick" x="{x(share) + 5:.1f}" y="{top - 5}">{text(name)}</text>')
        elif end == 1.0:  # the update is short: its name stands before it
            place = f'x="{x(share) - 8:.1f}" y="{top - 5}" text-anchor="end"'
            shapes.append(f'<text class="tick" {place}>{text(name)} →</text>')
    if limit <= scale_top:
        shapes.append(
            f'<line class="limit" x1="{left_margin}" x2="{width - 8}" y1="{y(limit):.1f}" y2="{y(limit):.1f}"/>'
        )
    shapes.append(f'<text class="tick" x="{left_margin - 8}" y="{top - 8}" text-anchor="end">GiB</text>')
    for share, name, anchor in ((0, "begin", "start"), (0.5, "operators of the step", "middle"), (1, "end", "end")):
        shapes.append(f'<text class="tick" x="{x(share):.1f}" y="{height - 10}" text-anchor="{anchor}">{name}</text>')
    keys = legend((MEMORY[n], n) for n in names)
    return f'{keys}<svg viewBox="0 0 {width} {height}" role="img" aria-label="{text(title)}">{"".join(shapes)}</svg>'


def ticks(scale_top: float) -> list[float]:
    """Returns three to six round values in bytes, for a scale in GiB."""
    spacing = scale_top / GIB / 5
    power = 10.0 ** floor(log10(spacing))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= spacing)
    return [step * n * GIB for n in range(int(scale_top / GIB / step) + 1)]
