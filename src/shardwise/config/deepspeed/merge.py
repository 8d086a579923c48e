"""Merges a translated DeepSpeed config into a run being loaded, and prints it as a RUN.yaml."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from shardwise.config.advanced import DEEPSPEED_ONLY, as_written, is_deepspeed_only, written
from shardwise.config.deepspeed.plan import KeyAccount, same, show
from shardwise.config.deepspeed.translate import Translation, line, translate
from shardwise.config.paths import ABSENT, find, place, remove


def merge(
    values: dict[str, Any], origin: dict[str, str], config: dict[str, Any], ranks: int, file: str
) -> tuple[KeyAccount, ...]:
    """Adds the values set by the config to the run's values, in place, with origins; returns the account.

    The run's file must not contradict the config. The command line may: it takes precedence, and the account notes it.
    """
    last_word = {path: find(values, path) for path, where in origin.items() if where == "command line"}
    file_values = copy.deepcopy(values)
    for path in sorted(last_word, reverse=True):  # deepest first, so that a section's leaves go before it
        _remove(file_values, path)
    translation = translate(config, ranks=ranks, run=file_values, file=file)
    notes = []
    for path, value in _leaves(translation.values):
        source = translation.sources.get(path) or translation.sources.get(path.rpartition(".")[0], "")
        covered = next((p for p in last_word if f"{path}.".startswith(f"{p}.") or p.startswith(f"{path}.")), None)
        if covered is not None:
            if not same(last_word[covered], value):
                note = f"{written(covered)}: {show(last_word[covered])} on the command line has the last word"
                notes.append(KeyAccount(source, value, "no effect", note))
            continue
        if find(values, path) is ABSENT:
            place(values, path, value)
            origin[path] = f"{file}: {source}"
    return (*translation.account, *notes)


def as_yaml(translation: Translation, values: dict[str, Any], file: str) -> str:
    """The RUN.yaml equivalent to the config: the account as comments, then the run's own and the translated values.

    It names the config where that holds what RUN.yaml cannot: one of DeepSpeed's schedules, CSV files.
    """
    run = copy.deepcopy(values)
    run.get("parallel", {}).pop("deepspeed", None)
    placeholder = [name for name in ("model", "data") if name not in run]
    run = {"model": "smollm2-135m-instruct", "data": {"train": "chat.jsonl"}} | run
    for path, value in _leaves(translation.values):
        place(run, path, value)
    for path in [path for path in DEEPSPEED_ONLY if is_deepspeed_only(translation.values, path)]:
        remove(run, path.rstrip("."))
        place(run, "parallel.deepspeed", file)
    run = as_written(run)
    lines = [f"# The equivalent of {Path(file).name}, key by key:"]
    rows = [line(entry) for entry in translation.account]
    width = min(60, max((len(key) for key, _, _ in rows), default=0))
    lines += [f"#   {key:<{width}}  {verdict:<9}  {done}" for key, verdict, done in rows]
    if placeholder:
        lines.append(f"# {' and '.join(placeholder)}: put in your own; a DeepSpeed config does not say.")
    return "\n".join(lines) + "\n" + yaml.safe_dump(run, sort_keys=False, allow_unicode=True, default_flow_style=None)


def _leaves(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in values.items():
        path = f"{prefix}{key}"
        leaves += _leaves(value, f"{path}.") if isinstance(value, dict) else [(path, value)]
    return leaves


def _remove(values: dict[str, Any], path: str) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        if not isinstance(values, dict):
            return
        values = values.get(part, {})
    if isinstance(values, dict):
        values.pop(leaf, None)
