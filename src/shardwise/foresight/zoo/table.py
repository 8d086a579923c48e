"""The zoo as a table: run from the command line, kept while it runs, written for the docs."""

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


def run_zoo(names: Sequence[str], axes: Sequence[str], tasks: Sequence[str], kept: Path | None) -> list[ZooResult]:
    """Results of every combination asked for; those in the file `kept` are not tried again, new ones are added."""
    _check(names, axes, tasks)
    warnings.filterwarnings("ignore")
    known = _read(kept)
    wanted = [
        (axis, task, name)
        for axis in axes for task in TASKS
        if task in tasks and task in MEANT.get(axis, TASKS)
        for name in architectures(task) if not names or name in names
    ]  # fmt: skip
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(wanted))
        for axis, task, name in wanted:
            progress.update(bar, description=f"{axis}: {name} ({task})")
            if (axis, task, name) not in known:
                known[axis, task, name] = next(trials(axis, task, [name]))
                if kept is not None:
                    kept.write_text(as_json(list(known.values())))
            progress.advance(bar)
    return [known[one] for one in wanted]


def _check(names: Sequence[str], axes: Sequence[str], tasks: Sequence[str]) -> None:
    listed = {name for task in TASKS for name in architectures(task)}
    for given, allowed, what in ((axes, set(AXES), "axis"), (tasks, set(TASKS), "task"), (names, listed, "name")):
        for one in given:
            if one not in allowed:
                near = ", ".join(sorted(allowed)[:8])
                raise UserError(what, one, "is not known", f"use one of {near}{' …' if len(allowed) > 8 else ''}")


def _read(kept: Path | None) -> dict[tuple[str, str, str], ZooResult]:
    if kept is None or not kept.is_file():
        return {}
    results = [ZooResult(**one) for one in json.loads(kept.read_text())]
    return {(one.axis, one.task, one.model_type): one for one in results}


def summary(results: Sequence[ZooResult]) -> list[str]:
    """For each task and axis, how many of the architectures that build are right."""
    lines = []
    for task, axis in dict.fromkeys((one.task, one.axis) for one in results):
        counts = Counter(one.outcome for one in results if (one.task, one.axis) == (task, axis))
        if axis == "expert":  # most have none
            dense = sum(one.why == "has no experts" for one in results if (one.task, one.axis) == (task, axis))
            counts["refused"] -= dense
        built = counts["pass"] + counts["wrong"] + counts["refused"]
        share = counts["pass"] / built if built else 0.0
        lines.append(
            f"{task}, {axis}: {counts['pass']} of {built} right ({share:.1%}), "
            f"{counts['wrong']} wrong, {counts['refused']} refused"
        )
    return lines


def as_markdown(results: Sequence[ZooResult], command: str) -> str:
    """The page in the docs."""
    import torch
    import transformers

    text = [
        "# Architectures and axes",
        "",
        f"Made by `{command}` (transformers {transformers.__version__}, torch {torch.__version__}): a tiny model of "
        "each class with two ranks along an axis, against one process: loss within 1e-5, every gradient within 1e-3 of "
        "its largest element.",
        "",
        *(f"- {line}" for line in summary(results)),
        "",
        "✓ the same as one process; – refused, for the reason in the last column; an empty field: not tried there.",
    ]
    for task in dict.fromkeys(one.task for one in results):
        own = [one for one in results if one.task == task]
        axes = list(dict.fromkeys(one.axis for one in own))
        text += [
            "",
            f"## {task}",
            "",
            f"| model | {' | '.join(axes)} | why not |",
            f"| --- |{' --- |' * (len(axes) + 1)}",
        ]
        for name in dict.fromkeys(one.model_type for one in own):
            row = {one.axis: one for one in own if one.model_type == name}
            text.append(_row(name, axes, row))
    return "\n".join(text) + "\n"


def _row(name: str, axes: Sequence[str], row: dict[str, ZooResult]) -> str:
    unbuilt = next((one for one in row.values() if one.outcome == "unbuilt"), None)
    if unbuilt is not None:
        return f"| {name} |{' |' * len(axes)} no tiny model runs here: {_cell(unbuilt.why)} |"
    dense = {axis for axis, one in row.items() if one.why == "has no experts"}
    signs = " | ".join("" if axis in dense or axis not in row else SIGNS[row[axis].outcome] for axis in axes)
    reasons: dict[str, list[str]] = {}
    for axis, one in row.items():
        if one.outcome in ("refused", "wrong") and axis not in dense:
            reasons.setdefault(_cell(one.why), []).append(axis)
    told = "; ".join(f"{', '.join(where)}: {why}" for why, where in reasons.items())
    return f"| {name} | {signs} | {told} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
