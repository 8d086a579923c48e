"""The dashboard in a terminal: curve, metrics, ranks and the end of the log, refreshed periodically.

If standard output is not a terminal it is printed once, as plain text, for a log or a pipe.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwise.core.stop_requested import StopRequested
from shardwise.observe.curve import Series, terminal_curve
from shardwise.observe.progress import _duration, _gibibytes, _rate, _six
from shardwise.watch.finder import Finder
from shardwise.watch.folder import RunFolder

REFRESH = 1.0  # seconds
POINTS = 4000
STYLES = {"running": "bold cyan", "finished": "bold green", "failed": "bold red", "silent": "bold yellow"}
LEAST_CURVE, MOST_CURVE = 5, 24  # rows
NONE = "no run here yet: it comes up as soon as one begins"


def show(finder: Finder, console: Console | None = None) -> None:
    """Draws the running (or newest) run and a line for each other, until Ctrl-C."""
    console = console or Console()
    if not console.is_terminal or not sys.stdout.isatty():
        # rich takes 80 columns where it cannot know; a log may be wider, a curve need not be.
        for run in finder.runs():
            run.wait()
        console.print(_Screen(finder, plain=True), soft_wrap=False)
        return
    stop = StopRequested()
    # Not as an exception, which would come in the middle of drawing and leave the terminal on its other screen.
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, stop) for kind in kinds}
    try:
        with Live(_Screen(finder), console=console, screen=True, auto_refresh=False) as live:
            while not stop.wait(REFRESH):
                live.refresh()  # also after the window changed its size: the screen measures itself anew
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    console.print(_Screen(finder, plain=True))  # what was last seen stays readable


class _Screen:
    """Everything shown, at the current size of the terminal."""

    def __init__(self, finder: Finder, plain: bool = False) -> None:
        self._finder, self._plain = finder, plain

    def __rich_console__(self, console: Console, options: Any) -> Any:
        runs = self._finder.runs()
        if not runs:
            yield Text(NONE)
            return
        overviews = [(run, run.overview()) for run in runs]
        chosen, _ = max(
            overviews, key=lambda pair: (pair[1]["state"]["word"] == "running", pair[1]["state"]["since"] or 0)
        )
        height = 60 if self._plain else console.size.height
        yield from draw(chosen, overviews, console.size.width, height, options.ascii_only)


def draw(
    run: RunFolder, overviews: list[tuple[RunFolder, dict[str, Any]]], width: int, height: int, ascii_only: bool
) -> list[RenderableType]:
    """The parts from top to bottom; the curve takes the room that the others leave."""
    detail = run.detail()
    parts: list[RenderableType] = [_head(detail, width), _figures(detail)]
    used = 3 + bool(detail["state"]["why"])
    others = [overview for other, overview in overviews if other is not run]
    below: list[RenderableType] = []
    if detail["ranks"]:
        rows = detail["ranks"][: max(2, height // 5)]
        # Those with something amiss are shown whatever the room.
        rows += [row for row in detail["ranks"] if row["amiss"] and row not in rows][:4]
        below.append(_ranks(rows, len(detail["ranks"])))
        used += len(rows) + 3
    lines = _log_lines(run, detail)
    if lines and height >= 24:
        shown_lines = lines[-max(3, height // 8) :]
        below += [Text("log", style="dim"), *(Text(line, no_wrap=True, overflow="ellipsis") for line in shown_lines)]
        used += len(shown_lines) + 1
    if others and height >= 20:
        shown_runs = others[: max(2, height // 10)]
        below.append(_others(shown_runs))
        used += len(shown_runs) + 1
    rows_left = min(MOST_CURVE, max(LEAST_CURVE, height - used - 6))
    curve = terminal_curve(_curves(run), max(32, width - 1), rows_left, ascii_only)
    parts.append(Text(curve, no_wrap=True, overflow="crop"))
    return [Group(*parts, *below)]


def _head(detail: dict[str, Any], width: int) -> Text:
    state = detail["state"]
    head = Text(detail["name"], style="bold", no_wrap=True, overflow="ellipsis")
    head.append(f"  {state['word']}", style=STYLES.get(state["word"], "bold"))
    if state["word"] in ("finished", "stopped", "silent", "failed") and state["since"]:
        head.append(f" {_duration(max(0.0, time.time() - state['since']))} ago", style="dim")
    if state["why"] and state["word"] != "finished":
        why = " ".join(str(state["why"]).split())
        head.append(f"\n{why[: 2 * width]}", style=STYLES.get(state["word"], ""))
    return head


def _figures(detail: dict[str, Any]) -> Text:
    last, evaluated = detail["latest"], detail["evaluated"]
    total = f"/{detail['total']}" if detail["total"] else ""
    figures = [
        ("step", f"{detail['step'] if detail['step'] is not None else '-'}{total}"),
        ("loss", _shown(last.get("loss"), _six)),
        ("eval", _shown(evaluated.get("loss"), _six)),
        ("entropy", _shown(last.get("cross_entropy"), _six)),
        ("aux", _shown(last.get("aux_loss"), _six)),
        ("z", _shown(last.get("z_loss"), _six)),
        ("lr", _shown(last.get("learning_rate"), lambda value: f"{value:.2g}")),
        ("grad", _shown(last.get("grad_norm"), _six)),
        ("tok/s", _shown(last.get("tokens_per_second"), _rate)),
        ("MFU", _shown(last.get("mfu"), lambda value: f"{value:.1%}")),
        ("GiB", _shown(last.get("memory_bytes"), _gibibytes)),
        ("elapsed", _shown(last.get("elapsed_seconds"), _duration)),
    ]
    if detail["state"]["word"] not in ("finished", "failed"):
        figures.append(("ETA", _shown(last.get("eta_seconds"), _duration)))
    line = Text()
    for name, value in figures:
        if value != "-":
            line.append(f"{name} ", style="dim").append(f"{value}  ")
    return line


def _ranks(rows: list[dict[str, Any]], count: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "step", "s/step", "waiting", "GiB"):
        table.add_column(name, justify="right")
    table.add_column(f"doing ({count} ranks)" if count > len(rows) else "doing", no_wrap=True, overflow="ellipsis")
    for row in rows:
        doing = Text(str(row["doing"]))
        if row["amiss"]:
            doing.append(f"  {row['amiss']}", style="bold yellow")
        cells = [_shown(row["seconds"], _six), _shown(row["waiting"], _six), _shown(row["memory"], _gibibytes)]
        table.add_row(str(row["rank"]), str(row["step"] or "-"), *cells, doing)
    return table


def _others(overviews: list[dict[str, Any]]) -> Group:
    lines = [Text("other runs", style="dim")]
    for overview in overviews:
        line = Text(f"{overview['name']}  ", no_wrap=True, overflow="ellipsis")
        line.append(overview["state"]["word"], style=STYLES.get(overview["state"]["word"], ""))
        line.append(f"  step {overview['step'] or '-'}  loss {_shown(overview['loss'], _six)}")
        lines.append(line)
    return Group(*lines)


def _log_lines(run: RunFolder, detail: dict[str, Any]) -> list[str]:
    """Last log lines of the first rank that has any."""
    for row in detail["ranks"][:8]:
        if lines := run.log(row["rank"], 12):
            return [f"rank {row['rank']}: {line}" for line in lines]
    return []


def _curves(run: RunFolder) -> dict[str, Series]:
    kinds = run.series(POINTS)["kinds"]
    labels = {"training loss": "train", "evaluation loss": "eval"}
    curves: dict[str, Series] = {}
    for name, kind in labels.items():
        if "loss" in kinds.get(kind, {}):
            at, values = kinds[kind]["loss"]
            curves[name] = [(int(x), float("nan") if y is None else y) for x, y in zip(at, values, strict=True)]
    return curves


def _shown(value: Any, show: Any) -> str:
    return str(show(float(value))) if isinstance(value, int | float) else "-"
