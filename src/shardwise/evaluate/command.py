"""`shardwise eval`: loads each model, measures it on each task, and shows the results.

Results are saved as they come: results.json is rewritten after each task, and samples.jsonl grows line by line, so that
Ctrl-C or a crash loses only the current task.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.checkpoint.folders import list_checkpoints
from shardwise.checkpoint.store import RUN
from shardwise.config.renamed import read_saved
from shardwise.config.schema import Run
from shardwise.core.errors import Interrupted, UserError
from shardwise.evaluate.bars import Bar, bars
from shardwise.evaluate.figures import TaskResult, difference
from shardwise.evaluate.settings import ChoiceTask, GenerateTask, HarnessTask, JudgeTask, LossTask
from shardwise.evaluate.table import print_results
from shardwise.nn.models.tasks import task_of

RESULTS, SAMPLES = "results.json", "samples.jsonl"
EXPORTED_RUN = "shardwise_run.json"


@dataclass
class EvaluationSession:
    """Results so far, and where they are written."""

    models: list[str]
    tasks: list[Any]
    output: Path | None
    results: dict[str, list[TaskResult]] = field(default_factory=dict)

    def begin(self) -> None:
        """Makes the output folder; samples of an earlier run are replaced."""
        if self.output is not None:
            try:
                self.output.mkdir(parents=True, exist_ok=True)
                (self.output / SAMPLES).write_text("")
            except OSError as error:
                problem = f"cannot be written ({error.strerror or error})"
                raise UserError("--output", str(self.output), problem, "choose a folder you may write to") from None

    def add(self, model: str, measured: TaskResult, seconds: float) -> None:
        """Adds a result and saves it."""
        measured.seconds = seconds
        self.results.setdefault(model, []).append(measured)
        if self.output is not None:
            partial = self.output / f".{RESULTS}"
            partial.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False))
            partial.replace(self.output / RESULTS)

    def keeper(self, model: str, task: str) -> Callable[[dict[str, Any]], None]:
        """Returns a function that saves samples of a model on a task."""
        if self.output is None:
            return lambda _: None
        file = self.output / SAMPLES

        def keep(sample: dict[str, Any]) -> None:
            with file.open("a", encoding="utf-8") as lines:
                line = json.dumps({"model": model, "task": task, **sample}, ensure_ascii=False, default=str)
                lines.write(line + "\n")

        return keep

    def to_json(self) -> dict[str, Any]:
        """Returns everything, with the differences from the first model."""
        tasks = [task.model_dump(mode="json") for task in self.tasks]
        results = {}
        for label, task_results in self.results.items():
            results[label] = [result.to_json() for result in task_results]
        return {"models": self.models, "tasks": tasks, "results": results, "differences": self._differences()}

    def _differences(self) -> dict[str, Any]:
        first, *others = self.models
        differences: dict[str, Any] = {}
        for other in others:
            for result in self.results.get(other, []):
                base = next((m for m in self.results.get(first, []) if m.task == result.task), None)
                for figure in result.figures:
                    reference = next((f for f in base.figures if f.name == figure.name), None) if base else None
                    if reference is not None and (change := difference(figure, reference)) is not None:
                        entry = {"value": change.value, "stderr": change.error, "paired": change.paired}
                        differences.setdefault(other, {}).setdefault(result.task, {})[figure.name] = entry
        return differences


def evaluate(
    models: Sequence[str], tasks: Sequence[Any], output: Path | None, as_json: bool, changed_tokenizer: bool = False
) -> None:
    """Measures and shows; raises Interrupted after Ctrl-C, having shown what was done."""
    if len(set(models)) < len(models):
        raise UserError("MODEL", " ".join(models), "one is named twice", "name each model once")
    runs = {name: run_of(name) for name in models}
    default_run = next((run for run in runs.values() if run is not None), None)
    todo = list(tasks) or [LossTask()]
    _check(todo, models, output)
    session = EvaluationSession(list(models), todo, output)
    session.begin()
    try:
        _measure_all(session, runs, default_run, changed_tokenizer)
    except KeyboardInterrupt:
        _show(session, as_json)
        done = sum(map(len, session.results.values()))
        total = len(models) * len(todo)
        raise Interrupted(f"stopped: {done} of {total} measurements are done and shown", 130) from None
    _show(session, as_json)


def _check(tasks: Sequence[Any], models: Sequence[str], output: Path | None) -> None:
    """Rejects mistakes before a model is loaded."""
    labels = [task.label for task in tasks]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError("tasks", twice, "two tasks have this name", "give them names of their own (name: …)")
    for task in tasks:
        if isinstance(task, JudgeTask) and output is None:
            problem = "answers and judgements are kept, to be looked at and used again"
            raise UserError("--output", None, problem, "add --output FOLDER")
        if isinstance(task, JudgeTask) and task.mode == "pairwise" and len(models) < 2:
            raise UserError("MODEL", models[0], "pairs need two models", "name another, or use mode: single")


def _measure_all(
    session: EvaluationSession, runs: dict[str, Run | None], default_run: Run | None, changed_tokenizer: bool
) -> None:
    from shardwise.evaluate.judge import collect_answers, judge_all
    from shardwise.export.inference import load_for_inference

    answers: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name in session.models:
        model, tokenizer = load_for_inference(name, changed_tokenizer, talks=False)
        for task in session.tasks:
            started = time.monotonic()
            with bars(f"{name}: {task.label}") as bar:
                if isinstance(task, JudgeTask):
                    assert session.output is not None
                    check_causal(name, model)
                    answers.setdefault(task.label, {})[name] = collect_answers(
                        task, name, model, tokenizer, session.output, bar
                    )
                    continue
                keep = session.keeper(name, task.label)
                results = _measure(task, name, model, tokenizer, runs[name] or default_run, bar, keep)
            for measured in results:
                session.add(name, measured, time.monotonic() - started)
        del model  # before the next one is loaded
        gc.collect()
    for task in session.tasks:
        if isinstance(task, JudgeTask):
            assert session.output is not None
            started = time.monotonic()
            with bars(f"judge: {task.label}") as bar:
                judged = judge_all(task, answers[task.label], session.output, bar)
            for name, measured in judged.items():
                session.add(name, measured, time.monotonic() - started)


def _measure(
    task: Any, name: str, model: Any, tokenizer: Any, run: Run | None, bar: Bar, keep: Callable[[dict[str, Any]], None]
) -> list[TaskResult]:
    if isinstance(task, LossTask):
        from shardwise.evaluate.loss import measure_loss

        return [measure_loss(task, name, model, tokenizer, run, bar)]
    check_causal(name, model)
    if isinstance(task, ChoiceTask):
        from shardwise.evaluate.choices import measure_choices

        return [measure_choices(task, model, tokenizer, bar, keep)]
    if isinstance(task, GenerateTask):
        from shardwise.evaluate.generation import measure_generation

        return [measure_generation(task, model, tokenizer, bar, keep)]
    assert isinstance(task, HarnessTask)
    from shardwise.evaluate.harness import measure_harness

    return measure_harness(task, model, tokenizer, keep)


def check_causal(name: str, model: Any) -> None:
    """Raises an error if the model does not generate text."""
    if (kind := task_of(model.config)) != "causal":
        problem = f"is a {type(model).__name__} ({kind}), which does not go on with a text"
        raise UserError("MODEL", name, problem, "measure its loss and figures: leave the other tasks out")


def _show(session: EvaluationSession, as_json: bool) -> None:
    if as_json:
        print(json.dumps(session.to_json(), indent=1, ensure_ascii=False))
    elif session.results:
        print_results(session.models, session.results, Console())
        if session.output is not None:
            print(f"  written to {session.output}")


def run_of(name: str) -> Run | None:
    """Returns the config of the run that trained a model, if its files have one.

    The files are searched as in `load_for_inference`.
    """
    path = Path(name).expanduser()
    checkpoints = [*list_checkpoints(path / "checkpoints"), *list_checkpoints(path)]
    places = [path / RUN if (path / "state").is_dir() else path / "model" / EXPORTED_RUN, path / EXPORTED_RUN]
    places += [checkpoints[-1] / RUN] if checkpoints else []
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return None
    try:
        return Run.model_validate(read_saved(file))
    except (ValueError, OSError):
        problem = f"{file} was written by another version and cannot be read"
        raise UserError("MODEL", name, problem, "export the model again with this version") from None
