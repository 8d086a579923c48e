"""Results for people: one table, models side by side."""

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
    """Prints a row per figure and a column per model that has results, with the difference from the first."""
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
        task_results = [_result(results[label], task) for label in labels]
        _add(table, task, task_results, compared)
        for label, result in zip(labels, task_results, strict=True):
            notes += [f"{task}, {label}: {note}" for note in result.notes] if result else []
        for name, reason in INCOMPARABLE.items():
            if compared and any(_incomparable(result, task_results[0], name) for result in task_results[1:]):
                notes.append(f"{task}: {reason}")
    console.print(table, highlight=False)
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False, style="yellow")
    if len(labels) > 1 and compared:
        console.print("  in brackets: difference to the first model; * more than two standard errors", style="dim")


def _add(table: Table, task: str, results: Sequence[TaskResult | None], compare: bool) -> None:
    seconds = [f"{_duration(m.seconds)}" if m else "" for m in results]
    names = list(dict.fromkeys(f.name for m in results if m for f in m.figures))
    for index, name in enumerate(names):
        _row(table, escape(task) if index == 0 else "", name, [_figure(m, name) for m in results], compare)
    groups = list(dict.fromkeys(g for m in results if m for g in m.groups))
    for group in groups[:MOST_GROUPS]:
        _row(table, "", f"  {group}", [m.groups.get(group) if m else None for m in results], compare)
    if len(groups) > MOST_GROUPS:
        table.add_row("", f"  and {len(groups) - MOST_GROUPS} more (--json has them)")
    table.add_row("", "[dim]time[/dim]", *(f"[dim]{s}[/dim]" for s in seconds))


def _result(results: Sequence[TaskResult], task: str) -> TaskResult | None:
    return next((result for result in results if result.task == task), None)


def _figure(measured: TaskResult | None, name: str) -> Figure | None:
    return next((f for f in measured.figures if f.name == name), None) if measured else None


def _row(table: Table, task: str, name: str, figures: Sequence[Figure | None], compare: bool) -> None:
    first = figures[0] if compare else None
    cells = [
        format_figure(f) + (format_difference(difference(f, first)) if n and f and first else "")
        for n, f in enumerate(figures)
    ]
    table.add_row(task, escape(name), *cells)


def format_figure(figure: Figure | None) -> str:
    """Formats a figure with its standard error."""
    if figure is None:
        return "-"
    if math.isnan(figure.value):
        return "nothing to measure"
    is_count = figure.name in ("win", "tie", "loss") and figure.error is None  # a judge's
    text = f"{figure.value:.0f}" if is_count and float(figure.value).is_integer() else f"{figure.value:.4f}"
    return text + (f" ± {figure.error:.4f}" if figure.error is not None else "")


def format_difference(change: FigureDifference | None) -> str:
    """Formats a difference from the first model, in brackets."""
    if change is None:
        return ""
    error = f" ± {change.error:.4f}" if change.error is not None else ""
    return f" ({change.value:+.4f}{error}){'*' if change.clear else ' '}"


def _incomparable(result: TaskResult | None, first: TaskResult | None, name: str) -> bool:
    figure = _figure(result, name)
    first_figure = _figure(first, name)
    if figure is None or first_figure is None or math.isnan(figure.value - first_figure.value):
        return False
    return difference(figure, first_figure) is None
