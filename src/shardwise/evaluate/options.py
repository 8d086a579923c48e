"""Makes the same tasks from the command's options that a file would describe."""

from __future__ import annotations

from typing import Any

from shardwise.core.errors import UserError
from shardwise.evaluate.settings import make_task, read_tasks

DEFAULTS = {"score": "byte", "scorer": "exact", "judge_mode": "single", "judge_key": "OPENAI_API_KEY"}
USED_BY = {
    "score": ("choice",), "shots": ("choice",), "examples": ("choice",), "scorer": ("generate",),
    "max_tokens": ("generate", "judge"), "lm_eval_folder": ("lm_eval",), "judge_url": ("judge",),
    "judge_model": ("judge",), "judge_mode": ("judge",), "judge_key": ("judge",),
    "limit": ("choice", "generate", "lm_eval", "judge"),
}  # fmt: skip


def tasks_from(options: dict[str, Any]) -> list[Any]:
    """Returns the tasks of the file, then those of the options; an option that no task uses is an error."""
    for name, users in USED_BY.items():
        is_set = options[name] and options[name] != DEFAULTS.get(name)
        if is_set and not any(options[user] for user in users):
            problem = "nothing that the options ask for uses it"
            raise UserError(_option(name), options[name], problem, "leave it out, or set it in the file of --tasks")
    tasks = read_tasks(options["tasks"]) if options["tasks"] is not None else []
    rows = {"limit": options["limit"]}
    length = {} if options["max_tokens"] is None else {"max_tokens": options["max_tokens"]}
    if options["data"]:
        tasks.append(make_task({"type": "loss", "data": list(options["data"])}, "--data"))
    for path in options["choice"] or ():
        choice_options = {name: options[name] for name in ("score", "shots", "examples")}
        tasks.append(make_task({"type": "choice", "path": path, **choice_options, **rows}, "--choice"))
    for path in options["generate"] or ():
        values = {"type": "generate", "path": path, "scorer": options["scorer"], **length, **rows}
        tasks.append(make_task(values, "--generate"))
    if options["lm_eval"]:
        values = {"type": "lm-eval", "tasks": list(options["lm_eval"]), "folder": options["lm_eval_folder"], **rows}
        tasks.append(make_task(values, "--lm-eval"))
    if options["judge"] is not None:
        for name in ("judge_url", "judge_model"):
            if options[name] is None:
                raise UserError(_option(name), None, "is needed to ask a judge", f"add {_option(name)} …")
        values = {name: options[f"judge_{name}"] for name in ("url", "model", "mode", "key")}
        tasks.append(make_task({"type": "judge", "path": options["judge"], **values, **length, **rows}, "--judge"))
    return tasks


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
