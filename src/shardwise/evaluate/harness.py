"""Tasks of EleutherAI's lm-eval, an optional extra, on the model that is already loaded."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from shardwise.core.errors import UserError
from shardwise.evaluate.figures import Figure, TaskResult
from shardwise.evaluate.settings import HarnessTask

BATCH = {"cuda": 16, "cpu": 4}
LESS_IS_BETTER = ("perplexity", "bits_per_byte")


def measure_harness(
    task: HarnessTask, model: Any, tokenizer: Any, keep: Callable[[dict[str, Any]], None]
) -> list[TaskResult]:
    """Returns the results of lm-eval, one entry for each of its tasks."""
    if importlib.util.find_spec("lm_eval") is None:
        problem = "needs the package lm-eval, which is not installed"
        raise UserError("--lm-eval", ", ".join(task.tasks), problem, "run: pip install 'shardwise[eval]'")
    harness: Any = importlib.import_module("lm_eval")
    wrapper: Any = importlib.import_module("lm_eval.models.huggingface")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _manager(task)
    if unknown := [name for name in task.tasks if name not in manager.all_tasks]:
        remedy = "check the name, or give the folder of your task files (--lm-eval-folder)"
        raise UserError("--lm-eval", unknown[0], "lm-eval knows no such task", remedy)
    wrapped = wrapper.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH.get(model.device.type, 8))
    try:
        output: Any = harness.simple_evaluate(
            model=wrapped, tasks=list(task.tasks), num_fewshot=task.shots, limit=task.limit, task_manager=manager
        )
    except (OSError, ConnectionError, FileNotFoundError) as error:  # its data, which it fetches by itself
        problem = f"its data could not be loaded ({str(error).splitlines()[0]})"
        remedy = "fetch them beforehand, or write a task file whose dataset_path is json and names local files"
        raise UserError("--lm-eval", ", ".join(task.tasks), problem, remedy) from None
    for name, samples in output.get("samples", {}).items():
        for sample in samples:
            keep({"lm_eval_task": name, **{k: sample.get(k) for k in ("doc_id", "doc", "target", "filtered_resps")}})
    return [_measured(name, values, output) for name, values in output["results"].items()]


def _manager(task: HarnessTask) -> Any:
    """Knows the user's tasks; lm-eval's own thousands are indexed only if those are not all that is requested."""
    task_manager = importlib.import_module("lm_eval.tasks").TaskManager
    if task.folder is not None:
        user_tasks = task_manager(include_path=task.folder, include_defaults=False)
        if set(task.tasks) <= set(user_tasks.all_tasks):
            return user_tasks
    return task_manager(include_path=task.folder)


def _measured(name: str, values: dict[str, Any], output: dict[str, Any]) -> TaskResult:
    count = output.get("n-samples", {}).get(name, {}).get("effective", 0)
    figures = []
    for key, value in values.items():
        metric, _, filter_name = key.partition(",")
        if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = values.get(f"{metric}_stderr,{filter_name}")
        label = metric if filter_name == "none" else f"{metric} ({filter_name})"
        higher_is_better = output.get("higher_is_better", {}).get(name, {}).get(metric, metric not in LESS_IS_BETTER)
        figures.append(
            Figure(label, float(value), error if isinstance(error, float) else None, count, bool(higher_is_better))
        )
    return TaskResult(name, "lm-eval", figures)
