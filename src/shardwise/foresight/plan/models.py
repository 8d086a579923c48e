"""Configs of models to plan for: a name in `models.yaml`, a folder, or the hub. No weights are read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import yaml

from shardwise.config.objectives import Task
from shardwise.config.schema import Model
from shardwise.core.errors import UserError
from shardwise.nn.models.source import EMBEDDED, ModelSource, config_from, find_model, first_line
from shardwise.nn.models.tasks import check_task, task_of


def model_names() -> list[str]:
    """Returns the names in the catalogue, which need no access to the hub."""
    return list(_entries())


def hub_name(name: str) -> str:
    """Returns the hub id of a model in the catalogue, for RUN.yaml."""
    return str(_entries().get(name.lower(), {}).get("hub") or name)


def find_config(model: Model, task: Task | None = None, say: Callable[[str], None] = lambda _: None) -> ModelSource:
    """Returns the model's class and sizes. Weights are neither read nor downloaded, so it cannot be trained from."""
    name = model.name
    if name is None or name == EMBEDDED or name.endswith(".gguf"):
        return find_model(model, say, task)
    if Path(name).expanduser().is_dir() or (key := _find_entry(name)) is None:
        config = _read(name, model) if "/" in name or Path(name).is_dir() else _unknown(name, "is no folder here")
    else:
        config = config_from(dict(_values(key)))
        config.architectures = _values(key).get("architectures")
    source = ModelSource(name, config, None, model.tokenizer or name, model.trust_remote_code)
    source = replace(source, task=task or task_of(config))
    check_task(source.config, source.task, source.label)
    return source


def _read(name: str, model: Model) -> Any:
    from transformers import AutoConfig

    path = Path(name).expanduser()
    try:
        return AutoConfig.from_pretrained(
            path if path.is_dir() else name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
    except Exception as error:
        problem = (
            "the folder has no config.json that transformers knows" if path.is_dir() else "not to be had from the hub"
        )
        return _unknown(name, f"{problem} ({first_line(error)[:120]})")


def _unknown(name: str, problem: str) -> NoReturn:
    close_matches = difflib.get_close_matches(_normalize(name), [_normalize(n) for n in _entries()], n=2, cutoff=0.6)
    suggestions = [n for n in _entries() if _normalize(n) in close_matches]
    examples = ", ".join(list(_entries())[:8])
    remedy = (
        f"did you mean {' or '.join(suggestions)}?"
        if suggestions
        else f"give a folder, a hub id, or e.g. {examples}, …"
    )
    raise UserError("model", name, f"{problem}, and no name of the catalogue", remedy) from None


@cache
def _entries() -> dict[str, dict[str, Any]]:
    text = files("shardwise.foresight.plan").joinpath("models.yaml").read_text()
    return dict(yaml.safe_load(text))


def _values(key: str) -> dict[str, Any]:
    entry = _entries()[key]
    inherited = _values(entry["like"]) if "like" in entry else {}
    return inherited | dict(entry.get("config") or {})


def _find_entry(name: str) -> str | None:
    """Finds the catalogue entry for a name as people write it: with or without owner or -Instruct."""
    normalized = _normalize(name)
    for key, entry in _entries().items():
        if normalized in (_normalize(key), _normalize(str(entry.get("hub") or ""))):
            return key
    return None


def _normalize(name: str) -> str:
    normalized = name.lower().rpartition("/")[2]
    for ending in ("-instruct", "-it", "-chat", "-base", "-hf", "-v0.3", "-v0.1", "-instruct-v0.3", "-instruct-v0.1"):
        normalized = normalized.removesuffix(ending)
    return re.sub(r"[^a-z0-9.]", "", normalized.replace("metallama", "llama").replace("meta-llama", "llama"))
