"""Results as people read them: a table per task, models side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwise.evaluate.figures import Figure, FigureDifference, TaskResult, difference
from shardwise.observe.progress import _duration

MOST_GROUPS = 60
INCOMPARABLE = {
    "loss": "the models cut the data into different tokens, so their losses cannot be compared",
    "grade": "the judge's grades could be read for different questions, so they are not compared",
}


def print_results(models: Sequence[str], results: dict[str, list[TaskResult]], console: Console) -> None:
    """One table: a row per figure, a column per model that has results, with the difference to the first of all."""
    labels = [model for model in models if model in results]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("task", style="bold", overflow="fold")
    table.add_column("figure", overflow="fold")
    for label in labels:
        table.add_column(escape(label), justify="right", overflow="fold")
    tasks = list(dict.fromkeys(m.task for of_model in results.values() for m in of_model))
    notes: list[str] = []
    compared = bool(labels) and labels[0] == models[0]
    for task in tasks:
        found = [next((m for m in results[label] if m.task == task), None) for label in labels]
        _add(table, task, found, compared)
        for label, one in zip(labels, found, strict=True):
            notes += [f"{task}, {label}: {note}" for note in one.notes] if one else []
        for name, why in INCOMPARABLE.items():
            if compared and any(_incomparable(one, found[0], name) for one in found[1:]):
                notes.append(f"{task}: {why}")
    console.print(table, highlight=False)
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False, style="yellow")
    if len(labels) > 1 and compared:
        console.print("  in brackets: difference to the first model; * more than two standard errors", style="dim")


def _add(table: Table, task: str, found: Sequence[TaskResult | None], compare: bool) -> None:
    seconds = [f"{_duration(m.seconds)}" if m else "" for m in found]
    names = list(dict.fromkeys(f.name for m in found if m for f in m.figures))
    for place, name in enumerate(names):
        _row(table, escape(task) if place == 0 else "", name, [_figure(m, name) for m in found], compare)
    groups = list(dict.fromkeys(g for m in found if m for g in m.groups))
    for group in groups[:MOST_GROUPS]:
        _row(table, "", f"  {group}", [m.groups.get(group) if m else None for m in found], compare)
    if len(groups) > MOST_GROUPS:
        table.add_row("", f"  and {len(groups) - MOST_GROUPS} more (--json has them)")
    table.add_row("", "[dim]time[/dim]", *(f"[dim]{s}[/dim]" for s in seconds))


def _figure(measured: TaskResult | None, name: str) -> Figure | None:
    return next((f for f in measured.figures if f.name == name), None) if measured else None


def _row(table: Table, task: str, name: str, figures: Sequence[Figure | None], compare: bool) -> None:
    first = figures[0] if compare else None
    cells = [
        shown(f) + (shown_difference(difference(f, first)) if n and f and first else "") for n, f in enumerate(figures)
    ]
    table.add_row(task, escape(name), *cells)


def shown(figure: Figure | None) -> str:
    """A figure with its standard error."""
    if figure is None:
        return "-"
    if math.isnan(figure.value):
        return "nothing to measure"
    text = (
        f"{figure.value:.0f}"
        if figure.name in ("win", "tie", "loss")
        and figure.error is None
        and float(figure.value).is_integer()  # a judge's
        else f"{figure.value:.4f}"
    )
    return text + (f" ± {figure.error:.4f}" if figure.error is not None else "")


def shown_difference(found: FigureDifference | None) -> str:
    """A difference to the first model, in brackets."""
    if found is None:
        return ""
    error = f" ± {found.error:.4f}" if found.error is not None else ""
    return f" ({found.value:+.4f}{error}){'*' if found.clear else ' '}"


def _incomparable(one: TaskResult | None, first: TaskResult | None, name: str) -> bool:
    two, base = _figure(one, name), _figure(first, name)
    if two is None or base is None or math.isnan(two.value - base.value):
        return False
    return difference(two, base) is None
