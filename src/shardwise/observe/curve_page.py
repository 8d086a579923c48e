"""The page behind `write_curve_html`: plain SVG, so that it shows without scripts and opens anywhere.

The script only adds the tooltip; the numbers are in a table too, for accessibility.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from string import Template

Points = Sequence[tuple[int, float]]
Lines = list[tuple[str, list[tuple[int, float]]]]  # each with the class that styles it

_MOST_POINTS = 1500  # per line: more than a screen has columns, and the page of a long run stays small
_MOST_ROWS = 200  # of the table
_COLOURS = 8  # of sources; more of them share
_MARGIN = {"left": 58, "right": 14, "top": 12, "bottom": 26}


@dataclass(frozen=True)
class SourceLines:
    """Losses of one data source."""

    name: str
    training: Points  # smoothed
    evaluation: Points


def render_page(
    title: str,
    subtitle: str,
    loss: Points,
    loss_smooth: Points,
    evaluation: Points,
    learning_rate: Points,
    grad_norm: Points,
    grad_smooth: Points,
    sources: Sequence[SourceLines] = (),
    parts: Sequence[SourceLines] = (),
) -> str:
    """Returns the full page as text; every line is a list of (step, value) in order, NaN for a gap.

    `parts`: components of the loss, each with its own chart.
    """
    parts = [SourceLines(p.name, _thinned(p.training), p.evaluation) for p in parts]
    sources = [SourceLines(s.name, _thinned(s.training), s.evaluation) for s in sources]
    every = [step for points in (loss, evaluation, learning_rate, grad_norm) for step, _ in points]
    steps = (min(every), max(every)) if every else (0, 0)
    thin = {
        "loss": _thinned(loss),
        "smooth": _thinned(loss_smooth),
        "eval": list(evaluation),
        "lr": _thinned(learning_rate),
        "grad": _thinned(grad_norm),
    }
    losses = [("raw", thin["loss"]), ("smooth", thin["smooth"]), ("eval", thin["eval"])]
    norms = [("grad raw", thin["grad"]), ("grad", _thinned(grad_smooth))]
    data = json.dumps(
        {key: _pairs(points) for key, points in thin.items()}
        | {"sources": [[text, _pairs(points)] for _, text, points in _source_lines([*sources, *parts])]}
    )
    return _PAGE.substitute(
        title=escape(title),
        subtitle=f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else "",
        colours="".join(
            f".line.s{i} {{ stroke:var(--s{i}) }} .swatch.s{i} {{ border-color:var(--s{i}) }} "
            f".dot.s{i} {{ fill:var(--s{i}) }}\n"
            for i in range(min(len(sources), _COLOURS))
        ),
        tiles=_tiles(loss_smooth, evaluation, every),
        warning=_warning(loss),
        legend=_legend(bool(loss), bool(evaluation)),
        loss=_panel("Loss by step", losses, steps, (920, 360), "wide"),
        sources=_source_card(thin["smooth"], sources, steps),
        parts=_part_cards(parts, steps),
        lr=_panel("Learning rate by step", [("lr", thin["lr"])], steps, (452, 170), "from-zero"),
        grad=_panel("Gradient norm by step", norms, steps, (452, 170), "from-zero"),
        table=_table(loss, evaluation, learning_rate, grad_norm, [*sources, *parts]),
        data=data.replace("<", "\\u003c"),  # nothing inside may end the script element
    )


def _pairs(points: Points) -> list[list[float | None]]:
    return [[step, _or_none(value)] for step, value in points]


def _source_lines(sources: Sequence[SourceLines]) -> list[tuple[str, str, Points]]:
    """Each non-empty line of the sources: its CSS class, name and points."""
    lines: list[tuple[str, str, Points]] = []
    for index, source in enumerate(sources):
        lines.append((f"s{index % _COLOURS}", source.name, source.training))
        lines.append((f"s{index % _COLOURS} held", f"{source.name}, evaluation", source.evaluation))
    return [line for line in lines if line[2]]


def _source_card(total: list[tuple[int, float]], sources: Sequence[SourceLines], steps: tuple[int, int]) -> str:
    """Chart of the losses by source beside the total; empty if there is only one source."""
    if not sources:
        return ""
    source_lines = _source_lines(sources)
    items = [("smooth", "all, smoothed"), *((name, text) for name, text, _ in source_lines)]
    legend = "".join(f'<span><i class="swatch {name}"></i>{escape(text)}</span>' for name, text in items)
    lines = [("smooth", total), *((name, list(points)) for name, _, points in source_lines)]
    chart = _panel("Loss by source and step", lines, steps, (920, 320), "wide")
    head = f'<div class="head"><h2>Loss by source</h2><div class="legend">{legend}</div></div>'
    return f'<section class="card">{head}{chart}</section>'


def _part_cards(parts: Sequence[SourceLines], steps: tuple[int, int]) -> str:
    """A small chart for each component of the loss; empty if there is only one."""
    cards = "".join(
        f'<section class="card"><div class="head"><h2>{escape(part.name)}</h2></div>'
        + _panel(f"{part.name} by step", [("smooth", list(part.training)), ("eval", list(part.evaluation))], steps,
                 (452, 170), "part")
        + "</section>"
        for part in parts
    )  # fmt: skip
    return f'<div class="row">{cards}</div>' if cards else ""


def _or_none(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _thinned(points: Points) -> list[tuple[int, float]]:
    """At most `_MOST_POINTS` points, keeping the extremes of each interval, where the spikes are."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    thinned: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        finite = [point for point in stretch if math.isfinite(point[1])]
        if not finite:
            thinned.append(stretch[0])
            continue
        low, high = min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])
        thinned.extend(sorted({low, high}))
    return thinned


def _number(value: float) -> str:
    """Formats a number: 1.234, 2e-5, 12,000."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}"


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers inside a range."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.7)
    first = math.ceil(low / size - 1e-9)
    return [index * size for index in range(first, math.floor(high / size + 1e-9) + 1)]


def _panel(label: str, lines: Lines, steps: tuple[int, int], size: tuple[int, int], kind: str) -> str:
    """One chart as SVG: grid, axes, and a line per series in the colour of its class.

    The axis of a "from-zero" chart starts at zero, where the size of a rate or a norm is read; a loss has no such zero.
    """
    width, height = size
    left, right = _MARGIN["left"], width - _MARGIN["right"]
    top, bottom = _MARGIN["top"], height - _MARGIN["bottom"]
    values = [value for _, points in lines for _, value in points if math.isfinite(value)]
    if not values:
        return f'<p class="empty" style="min-height:{height // 2}px">Nothing recorded yet</p>'
    low, high = min(values), max(values)
    room = (high - low) * 0.05 or max(abs(high), 1e-9) * 0.1
    low = min(0.0, low) if kind == "from-zero" else low - room
    high += room
    first, last = steps if steps[0] < steps[1] else (steps[0] - 1, steps[1] + 1)

    def x(step: float) -> float:
        return left + (step - first) / (last - first) * (right - left)

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    parts = []
    for tick in _ticks(low, high, 6 if height > 250 else 3):
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        at = f'x="{left - 8}" y="{y(tick) + 4:.1f}"'
        parts.append(f'<text class="tick" {at} text-anchor="end">{_number(tick)}</text>')
    across = _ticks(*steps, 8 if width > 600 else 4)
    for tick in sorted({round(tick) for tick in across}):
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{height - 6}" text-anchor="middle">{tick:,}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    for name, points in lines:
        placed = [(x(step), y(value) if math.isfinite(value) else None) for step, value in points]
        parts.append(f'<path class="line {name}" d="{_path(placed)}"/>')
        dots = (
            [(px, py) for px, py in placed if py is not None]
            if name == "eval" or "held" in name
            else _isolated_points(placed)
        )
        parts += [f'<circle class="dot {name}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>' for px, py in dots]
    parts.append(f'<line class="cross" x1="0" x2="0" y1="{top}" y2="{bottom}"/>')
    shape = f'viewBox="0 0 {width} {height}" data-left="{left}" data-right="{right}" data-width="{width}"'
    return (
        f'<svg class="chart {kind}" role="img" aria-label="{escape(label)}, from step {steps[0]} to {steps[1]}; '
        f'lowest {_number(min(values))}, highest {_number(max(values))}" '
        f'{shape} data-first="{first}" data-last="{last}">{"".join(parts)}</svg>'
    )


def _path(placed: list[tuple[float, float | None]]) -> str:
    """SVG path data; a gap starts a new subpath."""
    commands, drawing = [], False
    for px, py in placed:
        if py is not None:
            commands.append(f"{'L' if drawing else 'M'}{px:.1f} {py:.1f}")
        drawing = py is not None
    return "".join(commands)


def _isolated_points(placed: list[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The points without a neighbour to draw a line to."""
    heights = [None, *(py for _, py in placed), None]
    return [
        (px, py)
        for index, (px, py) in enumerate(placed, start=1)
        if py is not None and heights[index - 1] is None and heights[index + 1] is None
    ]


def _tiles(smooth: Points, evaluation: Points, every: list[int]) -> str:
    tiles = [("Steps", f"{max(every):,}" if every else "0", "")]
    finite = [value for _, value in smooth if math.isfinite(value)]
    if finite:
        tiles.append(("Training loss", _number(finite[-1]), f"from {_number(finite[0])}, smoothed"))
    scored = [(value, step) for step, value in evaluation if math.isfinite(value)]
    if scored:
        best, step = min(scored)
        tiles.append(("Evaluation loss", _number(scored[-1][0]), f"lowest {_number(best)} at step {step:,}"))
    return "".join(
        f'<div class="tile"><span>{name}</span><strong>{value}</strong><small>{note}</small></div>'
        for name, value, note in tiles
    )


def _warning(loss: Points) -> str:
    broken = [step for step, value in loss if not math.isfinite(value)]
    if not broken:
        return ""
    count = "one step" if len(broken) == 1 else f"{len(broken):,} steps"
    return f'<p class="warning">The loss was not finite at {count}, first at step {broken[0]:,}.</p>'


def _legend(train: bool, evaluation: bool) -> str:
    items = [("raw", "training, each step"), ("smooth", "training, smoothed")] if train else []
    items += [("eval", "evaluation")] if evaluation else []
    return "".join(f'<span><i class="swatch {name}"></i>{text}</span>' for name, text in items)


def _table(
    loss: Points, evaluation: Points, learning_rate: Points, grad_norm: Points, sources: Sequence[SourceLines]
) -> str:
    columns = [dict(loss), dict(evaluation), dict(learning_rate), dict(grad_norm)]
    lines = _source_lines(sources)
    columns += [dict(points) for _, _, points in lines]
    steps = sorted({step for column in columns for step in column})
    stride = max(1, math.ceil(len(steps) / _MOST_ROWS))
    # Evaluations are rare and wanted: they stay whatever the stride.
    rows_shown = [
        step for index, step in enumerate(steps) if index % stride == 0 or step in columns[1] or step == steps[-1]
    ]
    rows = ""
    for step in rows_shown:
        cells = "".join(f"<td>{_number(column[step]) if step in column else ''}</td>" for column in columns)
        rows += f"<tr><th scope=row>{step:,}</th>{cells}</tr>"
    names = [
        "Step",
        "Training loss",
        "Evaluation loss",
        "Learning rate",
        "Gradient norm",
        *(text for _, text, _ in lines),
    ]
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    caption = f"<caption>{len(rows_shown):,} of {len(steps):,} recorded steps</caption>"
    return f"{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --page:#f6f7f9; --card:#fff; --ink:#1b1f24; --muted:#5b6570; --grid:#e6e9ed; --axis:#b6bec7;
  --train:#1f6feb; --eval:#c2410c; --lr:#0f766e; --grad:#7c3aed; --warn:#9a3412;
  --s0:#0f766e; --s1:#c2410c; --s2:#7c3aed; --s3:#a16207; --s4:#be185d; --s5:#15803d; --s6:#0369a1; --s7:#6b7280; }
@media (prefers-color-scheme: dark) { :root { --page:#0f1216; --card:#181c22; --ink:#e6e9ed; --muted:#9aa4af;
  --grid:#2a3038; --axis:#4a535e; --train:#6ea8fe; --eval:#fb923c; --lr:#2dd4bf; --grad:#b794f6; --warn:#fdba74;
  --s0:#2dd4bf; --s1:#fb923c; --s2:#b794f6; --s3:#facc15; --s4:#f472b6; --s5:#4ade80; --s6:#38bdf8; --s7:#9ca3af; } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.45 system-ui,"Segoe UI",sans-serif }
main { max-width:960px; margin:0 auto; padding:28px 20px 48px }
h1 { font-size:22px; line-height:1.25; margin:0; overflow-wrap:anywhere }
h2 { font-size:14px; font-weight:600; margin:0 }
.subtitle { color:var(--muted); margin:4px 0 0; overflow-wrap:anywhere }
.tiles { display:flex; flex-wrap:wrap; gap:12px; margin:20px 0 12px }
.tile, .card { background:var(--card); border:1px solid var(--grid); border-radius:10px }
.tile { padding:10px 16px; min-width:150px; display:flex; flex-direction:column }
.tile span, .tile small { color:var(--muted); font-size:12.5px }
.tile strong { font-size:21px; font-variant-numeric:tabular-nums }
.card { padding:14px 16px 8px; margin-bottom:12px; position:relative; min-width:0 }
.row { display:grid; grid-template-columns:1fr 1fr; gap:12px }
.head { display:flex; flex-wrap:wrap; justify-content:space-between; gap:4px 16px; margin-bottom:6px }
.legend { display:flex; flex-wrap:wrap; gap:4px 16px; color:var(--muted); font-size:13px }
.swatch { display:inline-block; width:18px; margin-right:6px; vertical-align:middle; border-top:3px solid var(--train) }
.swatch.raw { border-top-width:1px; opacity:.6 }
.swatch.eval { width:9px; height:9px; border:0; border-radius:50%; background:var(--eval) }
.chart { display:block; width:100%; height:auto; overflow:visible; touch-action:pan-y }
.grid { stroke:var(--grid) } .axis { stroke:var(--axis) }
.tick { fill:var(--muted); font-size:11.5px; font-variant-numeric:tabular-nums }
.line { fill:none; stroke-linejoin:round; stroke-linecap:round; stroke:var(--train); vector-effect:non-scaling-stroke }
.line.raw { stroke-width:1; opacity:.4 } .line.smooth { stroke-width:2.4 }
.line.eval { stroke:var(--eval); stroke-width:1; stroke-dasharray:3 3; opacity:.7 }
.line.lr { stroke:var(--lr); stroke-width:1.8 } .line.grad { stroke:var(--grad); stroke-width:2 }
.line.grad.raw { stroke-width:1; opacity:.3 }
.dot { fill:var(--train) } .dot.lr { fill:var(--lr) } .dot.grad { fill:var(--grad) }
.dot.eval { fill:var(--eval); stroke:var(--card); stroke-width:1.2 }
$colours
.line.held { stroke-width:1; stroke-dasharray:3 3 } .swatch.held { border-top-style:dotted }
@media (max-width:640px) { .row { grid-template-columns:1fr; gap:0 } .wide .tick { font-size:20px } .wide .dot { r:5 } }
.cross { stroke:var(--muted); stroke-dasharray:2 3; visibility:hidden }
.tip { position:absolute; top:0; left:0; pointer-events:none; visibility:hidden; z-index:1; padding:7px 10px;
  background:var(--ink); color:var(--card); border-radius:7px; font-size:12.5px; white-space:pre;
  font-variant-numeric:tabular-nums }
.empty { display:grid; place-items:center; color:var(--muted); margin:0 }
.warning { color:var(--warn); margin:0 0 12px }
details { color:var(--muted); margin-top:16px } summary { cursor:pointer }
table { border-collapse:collapse; margin-top:8px; font-size:13px; font-variant-numeric:tabular-nums }
caption { text-align:left; padding-bottom:4px } .scroll { overflow-x:auto }
th, td { text-align:right; padding:3px 14px 3px 0; border-bottom:1px solid var(--grid); font-weight:400 }
thead th { font-weight:600 }
</style>
</head>
<body>
<main>
<h1>$title</h1>
$subtitle
<div class="tiles">$tiles</div>
$warning
<section class="card"><div class="head"><h2>Loss</h2><div class="legend">$legend</div></div>$loss</section>
$sources
$parts
<div class="row">
<section class="card"><div class="head"><h2>Learning rate</h2></div>$lr</section>
<section class="card"><div class="head"><h2>Gradient norm</h2></div>$grad</section>
</div>
<details><summary>Data table</summary><div class="scroll"><table>$table</table></div></details>
</main>
<script type="application/json" id="data">$data</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const names = [["loss", "training"], ["smooth", "smoothed"], ["eval", "evaluation"],
               ["lr", "learning rate"], ["grad", "gradient norm"]];
const charts = [...document.querySelectorAll(".chart")];
const tip = document.createElement("div");
tip.className = "tip";
function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}
function format(value) {
  if (value === null) return "not finite";
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(5)));
}
function hide() {
  tip.style.visibility = "hidden";
  for (const chart of charts) chart.querySelector(".cross").style.visibility = "hidden";
}
function show(chart, event) {
  const box = chart.getBoundingClientRect(), set = chart.dataset, span = set.last - set.first;
  const at = (event.clientX - box.left) / box.width * set.width;
  const wanted = +set.first + (at - set.left) / (set.right - set.left) * span;
  const guide = [data.loss, data.lr, data.grad, data.eval].find(points => points.length);
  const step = nearest(guide, wanted)[0];
  const rows = ["step " + step.toLocaleString("en")];
  for (const [key, name] of names) {
    if (!data[key].length) continue;
    const [where, value] = nearest(data[key], step);
    if (Math.abs(where - step) > span / 50) continue;
    rows.push(name + " " + format(value) + (where === step ? "" : " (step " + where.toLocaleString("en") + ")"));
  }
  for (const [name, points] of data.sources) {
    const [where, value] = nearest(points, step);
    if (Math.abs(where - step) <= span / 50) rows.push(name + " " + format(value));
  }
  tip.textContent = rows.join("\\n");
  for (const other of charts) {
    const own = other.dataset, line = other.querySelector(".cross");
    const x = +own.left + (step - own.first) / (own.last - own.first) * (own.right - own.left);
    line.setAttribute("x1", x); line.setAttribute("x2", x); line.style.visibility = "visible";
  }
  const card = chart.parentElement, frame = card.getBoundingClientRect();
  card.append(tip);
  const x = event.clientX - frame.left, fits = x + 14 + tip.offsetWidth <= frame.width;
  tip.style.left = Math.max(4, fits ? x + 14 : x - 14 - tip.offsetWidth) + "px";
  tip.style.top = Math.max(4, event.clientY - frame.top - tip.offsetHeight - 8) + "px";
  tip.style.visibility = "visible";
}
for (const chart of charts) {
  chart.addEventListener("pointermove", event => show(chart, event));
  chart.addEventListener("pointerdown", event => show(chart, event));
  chart.addEventListener("pointerleave", hide);
}
</script>
</body>
</html>
""")
