"""The zoo as a table: run from the command line, saved while it runs, written for the docs."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.config.objectives import Task
from shardwise.core.errors import UserError
from shardwise.foresight.zoo.run import AXES, ZooResult, architectures, as_json, trials

TASKS: tuple[Task, ...] = ("causal", "masked", "seq2seq")
SIGNS = {"pass": "✓", "wrong": "WRONG", "refused": "–", "unbuilt": ""}
MEANT = {"expert": ("causal",), "context": ("causal", "masked")}  # tasks that an axis is tried on, where not all


def run_zoo(
    names: Sequence[str], axes: Sequence[str], tasks: Sequence[str], results_file: Path | None
) -> list[ZooResult]:
    """Returns the results of every requested combination; those in the file `kept` are reused, new ones added."""
    _check(names, axes, tasks)
    warnings.filterwarnings("ignore")
    results = _read(results_file)
    combinations = [
        (axis, task, name)
        for axis in axes for task in TASKS
        if task in tasks and task in MEANT.get(axis, TASKS)
        for name in architectures(task) if not names or name in names
    ]  # fmt: skip
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(combinations))
        for axis, task, name in combinations:
            progress.update(bar, description=f"{axis}: {name} ({task})")
            if (axis, task, name) not in results:
                results[axis, task, name] = next(trials(axis, task, [name]))
                if results_file is not None:
                    results_file.write_text(as_json(list(results.values())))
            progress.advance(bar)
    return [results[combination] for combination in combinations]


def _check(names: Sequence[str], axes: Sequence[str], tasks: Sequence[str]) -> None:
    known_names = {name for task in TASKS for name in architectures(task)}
    for names_given, allowed, option in (
        (axes, set(AXES), "axis"),
        (tasks, set(TASKS), "task"),
        (names, known_names, "name"),
    ):
        for name_given in names_given:
            if name_given not in allowed:
                examples = ", ".join(sorted(allowed)[:8])
                raise UserError(
                    option, name_given, "is not known", f"use one of {examples}{' …' if len(allowed) > 8 else ''}"
                )


def _read(results_file: Path | None) -> dict[tuple[str, str, str], ZooResult]:
    if results_file is None or not results_file.is_file():
        return {}
    results = [ZooResult(**result) for result in json.loads(results_file.read_text())]
    return {(result.axis, result.task, result.model_type): result for result in results}


def summary(results: Sequence[ZooResult]) -> list[str]:
    """Returns a line for each task and axis: how many of the architectures that build are right."""
    lines = []
    for task, axis in dict.fromkeys((result.task, result.axis) for result in results):
        counts = Counter(result.outcome for result in results if (result.task, result.axis) == (task, axis))
        if axis == "expert":  # most have none
            dense = sum(
                result.why == "has no experts" for result in results if (result.task, result.axis) == (task, axis)
            )
            counts["refused"] -= dense
        built = counts["pass"] + counts["wrong"] + counts["refused"]
        share = counts["pass"] / built if built else 0.0
        plain = sum(
            result.plain == 1 and result.outcome == "pass"
            for result in results
            if (result.task, result.axis) == (task, axis)
        )
        lines.append(
            f"{task}, {axis}: {counts['pass']} of {built} right ({share:.1%}), "
            f"{counts['wrong']} wrong, {counts['refused']} refused"
            + (f"; every block on plain tensors: {plain}" if axis == "tensor" else "")
        )
    return lines


def as_markdown(results: Sequence[ZooResult], command: str) -> str:
    """Returns the page for the docs."""
    import torch
    import transformers

    lines = [
        "# Architectures and axes",
        "",
        f"Made by `{command}` (transformers {transformers.__version__}, torch {torch.__version__}): a tiny model of "
        "each class with two ranks along an axis, against one process: loss within 1e-5, every gradient within 1e-3 of "
        "its largest element.",
        "",
        *(f"- {line}" for line in summary(results)),
        "",
        "✓ the same as one process, (✓) with blocks that run as DTensors, which is slower; – refused, for the reason "
        "in the last column; an empty field: not tried there.",
    ]
    for task in dict.fromkeys(result.task for result in results):
        task_results = [result for result in results if result.task == task]
        axes = list(dict.fromkeys(result.axis for result in task_results))
        lines += [
            "",
            f"## {task}",
            "",
            f"| model | {' | '.join(axes)} | why not |",
            f"| --- |{' --- |' * (len(axes) + 1)}",
        ]
        for name in dict.fromkeys(result.model_type for result in task_results):
            row = {result.axis: result for result in task_results if result.model_type == name}
            lines.append(_row(name, axes, row))
    return "\n".join(lines) + "\n"


def _row(name: str, axes: Sequence[str], row: dict[str, ZooResult]) -> str:
    unbuilt = next((result for result in row.values() if result.outcome == "unbuilt"), None)
    if unbuilt is not None:
        return f"| {name} |{' |' * len(axes)} no tiny model runs here: {_cell(unbuilt.why)} |"
    dense = {axis for axis, result in row.items() if result.why == "has no experts"}
    signs = " | ".join("" if axis in dense or axis not in row else _sign(row[axis]) for axis in axes)
    reasons: dict[str, list[str]] = {}
    for axis, result in row.items():
        if result.outcome in ("refused", "wrong") and axis not in dense:
            reasons.setdefault(_cell(result.why), []).append(axis)
    explanation = "; ".join(f"{', '.join(axes_affected)}: {reason}" for reason, axes_affected in reasons.items())
    return f"| {name} | {signs} | {explanation} |"


def _sign(result: ZooResult) -> str:
    sign = SIGNS[result.outcome]
    return f"({sign})" if result.axis == "tensor" and result.outcome == "pass" and result.plain != 1 else sign


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
