"""The loss curve of a run: as text for a terminal, and as one self-contained HTML file.

Both read the records of the metrics file, so they work for running, failed and finished runs alike.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from shardwise.observe.curve_page import SourceLines, render_page
from shardwise.observe.metrics import Record

Series = list[tuple[int, float]]

_TRAIN, _EVAL = "training loss", "evaluation loss"
PARTS = {  # of a loss that has more in it than one thing
    "cross_entropy": "Cross-entropy",
    "loss_objective": "Loss without routers",
    "aux_loss": "Auxiliary loss of routers",
    "z_loss": "z-loss of routers",
}
_MARKERS, _ASCII_MARKERS = "●◆▲■", "o+x@"
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # dot bits, by row and column of a cell


def series_from(records: list[Record]) -> dict[str, Series]:
    """Returns the training and the evaluation loss by step; non-finite losses are NaN, drawn as gaps."""
    kinds = {_TRAIN: "train", _EVAL: "eval"}
    series = {name: _column(records, kind, "loss") for name, kind in kinds.items()}
    return {name: points for name, points in series.items() if points}


def terminal_curve(series: dict[str, Series], width: int = 72, height: int = 12, ascii_only: bool = False) -> str:
    """Returns a text plot `width` columns wide (32 at least): the first series as a line, the others as markers.

    `height` counts the rows of the curve; the legend and the axis of steps come on top of it.
    """
    finite = {name: _finite(points) for name, points in series.items()}
    if not any(finite.values()):
        return "(no finite loss to plot)" if any(series.values()) else "(no loss recorded yet)"
    height = max(height, 3)
    area = _Area.around(finite, max(width, 32), height, ascii_only)
    canvas = _Canvas(area.columns, height, ascii_only)
    line, *marked = series
    _draw_line(canvas, area, series[line], "*" if ascii_only else "•")
    markers = _ASCII_MARKERS if ascii_only else _MARKERS
    signs = {name: markers[index % len(markers)] for index, name in enumerate(marked)}
    for name, sign in signs.items():
        for step, value in finite[name]:
            canvas.mark(*area.place(step, value), sign)
    legend = _legend(finite, {line: "*" if ascii_only else "⠒⠒", **signs}, max(width, 32))
    return "\n".join([*legend, *_framed(canvas.rows(), area, ascii_only)])


def write_curve_html(path: Path, records: list[Record], title: str, subtitle: str = "") -> None:
    """Writes one self-contained page with the losses, the learning rate and the gradient norm of a run."""
    loss, grad_norm = _column(records, "train", "loss"), _column(records, "train", "grad_norm")
    page = render_page(
        title=title,
        subtitle=subtitle,
        loss=loss,
        loss_smooth=_smoothed(loss),
        evaluation=_column(records, "eval", "loss"),
        learning_rate=_column(records, "train", "learning_rate"),
        grad_norm=grad_norm,
        grad_smooth=_smoothed(grad_norm),
        sources=[SourceLines(name, _smoothed(_of_source(records, "train", name)), _of_source(records, "eval", name))
                 for name in _sources(records)],
        parts=[SourceLines(name, _smoothed(train), _column(records, "eval", key)) for key, name in PARTS.items()
               if (train := _column(records, "train", key))],
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    # A browser may reload the page while a run rewrites it.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)


def _column(records: list[Record], kind: str, key: str) -> Series:
    """One metric by step, in order; for a repeated step the later record counts."""
    by_step: dict[int, float] = {}
    for record in records:
        if record.get("kind") == kind and record.get("step") is not None and key in record:
            value = record[key]
            finite = isinstance(value, int | float) and math.isfinite(value)
            by_step[int(record["step"])] = float(value) if finite else math.nan
    return sorted(by_step.items())


def _sources(records: list[Record]) -> list[str]:
    """The sources in the records, in order of appearance; empty if there is only one."""
    return list(dict.fromkeys(name for record in records for name in record.get("losses") or {}))


def _of_source(records: list[Record], kind: str, name: str) -> Series:
    """The loss of one source by step; steps without data of it are skipped."""
    own = [r | {"own": r["losses"][name]} for r in records if name in (r.get("losses") or {})]
    return _column(own, kind, "own")


def _finite(points: Series) -> Series:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _smoothed(points: Series) -> Series:
    """Centred exponential mean: a trailing one would lag behind a steep start."""
    span = min(100.0, max(1.0, len(points) / 25))
    keep = 1 - 2 / (span + 1)
    values = [value for _, value in points]
    back, ahead = _decayed(values, keep), _decayed(values[::-1], keep)[::-1]
    smooth = []
    for (step, value), (sum_back, weight_back), (sum_ahead, weight_ahead) in zip(points, back, ahead, strict=True):
        # Both sums hold the point itself. At a gap the mean is NaN too, so that the gap shows.
        mean = (sum_back + sum_ahead - value) / (weight_back + weight_ahead - 1)
        smooth.append((step, mean))
    return smooth


def _decayed(values: list[float], keep: float) -> list[tuple[float, float]]:
    """For each value the exponentially weighted sum up to it, and the sum of weights; gaps are ignored."""
    total = 0.0
    weight = 0.0
    sums = []
    for value in values:
        known = math.isfinite(value)
        total, weight = keep * total + (value if known else 0.0), keep * weight + known
        sums.append((total, max(weight, 1.0)))  # below 1 only at a gap, where the mean is NaN whatever the weight
    return sums


@dataclass(frozen=True)
class _Area:
    """Maps steps and losses to dots of a canvas."""

    steps: tuple[int, int]
    values: tuple[float, float]
    columns: int  # of characters
    dots: tuple[int, int]  # across and down
    labels: dict[int, str]  # of the loss, by row

    @classmethod
    def around(cls, series: dict[str, Series], width: int, height: int, ascii_only: bool) -> _Area:
        points = [point for line in series.values() for point in line]
        steps = min(step for step, _ in points), max(step for step, _ in points)
        low, high = min(value for _, value in points), max(value for _, value in points)
        if low < high:
            marked = (0, height // 2, height - 1) if height > 4 else (0, height - 1)
            labels = {row: _label(high - (high - low) * row / (height - 1)) for row in marked}
        else:  # a flat curve runs through the middle
            labels = {height // 2: _label(low)}
            low, high = low - max(abs(low), 1.0) / 20, high + max(abs(high), 1.0) / 20
        columns = width - max(map(len, labels.values())) - 2
        across, down = (1, 1) if ascii_only else (2, 4)
        return cls(steps, (low, high), columns, (columns * across, height * down), labels)

    def place(self, step: int, value: float) -> tuple[int, int]:
        """The dot of a point, counted from the top left."""
        (first, last), (low, high), (across, down) = self.steps, self.values, self.dots
        x = (step - first) / (last - first) if last > first else 0.5
        y = (high - value) / (high - low)
        return round(x * (across - 1)), round(y * (down - 1))


class _Canvas:
    """A grid of characters that is drawn on in dots."""

    def __init__(self, columns: int, rows: int, ascii_only: bool) -> None:
        self._ascii = ascii_only
        self._bits = [[0] * columns for _ in range(rows)]
        self._signs: dict[tuple[int, int], str] = {}

    def dot(self, x: int, y: int) -> None:
        if self._ascii:
            self._bits[y][x] = 1
        else:
            self._bits[y // 4][x // 2] |= _BRAILLE[y % 4][x % 2]

    def mark(self, x: int, y: int, sign: str) -> None:
        self._signs[(x, y) if self._ascii else (x // 2, y // 4)] = sign

    def rows(self) -> list[str]:
        def cell(x: int, y: int, bits: int) -> str:
            dots = "*" if self._ascii else chr(0x2800 + bits)
            return self._signs.get((x, y)) or (dots if bits else " ")

        return ["".join(cell(x, y, bits) for x, bits in enumerate(row)) for y, row in enumerate(self._bits)]


def _draw_line(canvas: _Canvas, area: _Area, points: Series, sign: str) -> None:
    """Joins the points, leaving gaps at NaNs; steps that share a dot column are drawn at their mean."""
    stretches: list[dict[int, list[float]]] = [{}]
    for step, value in points:
        if not math.isfinite(value):
            stretches.append({})
            continue
        stretches[-1].setdefault(area.place(step, value)[0], []).append(value)
    for stretch in stretches:
        if len(stretch) == 1:  # a lone dot is easily missed
            ((x, values),) = stretch.items()
            canvas.mark(x, area.place(area.steps[0], sum(values) / len(values))[1], sign)
            continue
        before: tuple[int, int] | None = None
        for x, values in stretch.items():
            y = area.place(area.steps[0], sum(values) / len(values))[1]
            left, top = before or (x, y)
            length = max(abs(x - left), abs(y - top), 1)
            for index in range(length + 1):
                canvas.dot(left + round((x - left) * index / length), top + round((y - top) * index / length))
            before = (x, y)


def _label(value: float) -> str:
    return f"{value:#.4g}"


def _legend(finite: dict[str, Series], signs: dict[str, str], width: int) -> list[str]:
    """Names each series with its last value, on as many lines as the width requires."""
    lines = [""]
    for name, sign in signs.items():
        last = f" {_label(finite[name][-1][1])}" if finite[name] else ""
        item = f"{sign} {name}{last}"
        if lines[-1] and len(lines[-1]) + 3 + len(item) > width:
            lines.append("")
        lines[-1] = (lines[-1] + "   " + item if lines[-1] else item)[:width]
    return lines


def _framed(rows: list[str], area: _Area, ascii_only: bool) -> list[str]:
    """Adds the axes to the drawn rows: losses at the left, steps below."""
    upright, tick, corner, level = ("|", "+", "+", "-") if ascii_only else ("│", "┤", "└", "─")
    indent = max(map(len, area.labels.values())) + 1
    framed = [f"{area.labels.get(row, ''):>{indent - 1}} " for row in range(len(rows))]
    framed = [
        label + (tick if row in area.labels else upright) + text
        for row, (label, text) in enumerate(zip(framed, rows, strict=True))
    ]
    first, last = area.steps
    if first == last:
        steps = f"step {first}".center(area.columns)
    else:
        gap = area.columns - len(str(first)) - len(str(last))
        steps = f"{first}{'step' if gap > 6 else '':^{gap}}{last}"
    left = " " * indent
    return [line.rstrip() for line in [*framed, left + corner + level * area.columns, f"{left} {steps}"]]
