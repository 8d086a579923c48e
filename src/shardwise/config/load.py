"""Loads RUN.yaml with overrides, and records the origin of each value.

`load_run` is the only way in: file, then `key.path=value` overrides, then the DeepSpeed config that the run names, then
defaults. Every value of the result has an origin ("run.yaml:12", "command line", "ds_config.json: gradient_clipping",
"default"), which `shardwise config` prints and error messages cite.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from shardwise.config.advanced import (
    DEEPSPEED_ONLY,
    FORMER_PLACES,
    as_written,
    is_deepspeed_only,
    move_inside,
)
from shardwise.config.explain import explain, near_file, section_names, takes_text, unknown_advanced
from shardwise.config.paths import ABSENT, find
from shardwise.config.renamed import both_given, drop, new_path, rename, rename_override
from shardwise.config.schema import Run
from shardwise.core.bounded_yaml import BoundedLoader
from shardwise.core.errors import UserError

if TYPE_CHECKING:
    from shardwise.config.deepspeed import KeyAccount


@dataclass(frozen=True)
class LoadedRun:
    """A validated run, the origin of each value, and the account of a DeepSpeed config's keys.

    `notes`: one for each setting that was given under its old name.
    """

    run: Run
    origin: dict[str, str] = field(default_factory=dict)
    account: tuple[KeyAccount, ...] = ()
    notes: tuple[str, ...] = ()

    def origin_of(self, path: str) -> str:
        """Origin of the value at a dotted path, also through short forms such as `train: chat.jsonl`."""
        if path in self.origin:
            return self.origin[path]
        while path.rpartition(".")[2] in ("path", "name") or path.rpartition(".")[2].isdigit():
            path = path.rpartition(".")[0]
            if path in self.origin:
                return self.origin[path]
        return "default"

    def print_notes(self) -> None:
        """Prints the notes to standard error, apart from what a command prints for programs."""
        for note in self.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)


def load_run(source: str | Path | dict[str, Any] | Run, overrides: list[str] | tuple[str, ...] = ()) -> LoadedRun:
    """Loads and validates a run with overrides; raises UserError with field, value and remedy."""
    values, origin, base, notes = read_values(source, overrides)
    account = _merge_deepspeed(values, origin)
    try:
        return LoadedRun(Run.model_validate(values), origin, account, notes)
    except ValidationError as error:
        raise explain(error, origin, base) from None


def read_values(
    source: str | Path | dict[str, Any] | Run, overrides: list[str] | tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, str], str, tuple[str, ...]]:
    """Run's values of file and overrides before validation, the origin of each, a name for the source, and notes."""
    by_hand = not isinstance(source, Run)
    if isinstance(source, Run):
        source = as_written(source.model_dump(exclude_unset=True))
    origin: dict[str, str] = {}
    if isinstance(source, dict):
        values = _plain(source)
        base = "the given dict"
        _note(values, "", "given", origin)
    else:
        values = _read_yaml(Path(source), origin)
        base = str(source)
    notes = rename(values, origin, FORMER_PLACES)
    if isinstance(values.get("model"), str):
        values["model"] = {"name": values["model"]}
        origin["model.name"] = origin.get("model", "given")
    spelled: dict[str, str] = {}  # today's name of each override: as it was written
    for override in overrides:
        notes += _override(values, override, origin, spelled)
    for name in section_names():  # a section with every line commented out is null: its defaults are meant
        if name in values and values[name] is None:
            del values[name]
    notes += drop(values, origin)
    for path, value in move_inside(values, origin).items():
        raise unknown_advanced(path, value, origin, base)
    if by_hand and find(values, "parallel.deepspeed") in (ABSENT, None, ""):
        notes += [_deepspeed_note(path, origin) for path in DEEPSPEED_ONLY if is_deepspeed_only(values, path)]
    return values, origin, base, tuple(dict.fromkeys(notes))


def _deepspeed_note(path: str, origin: dict[str, str]) -> str:
    name = path.rstrip(".")
    where = f" ({origin[name]})" if name in origin else ""
    what = name if name == path else f"{name} with settings of its own"
    return f"{what} is left to DeepSpeed configs (parallel.deepspeed); here it works until the next release{where}"


def _merge_deepspeed(values: dict[str, Any], origin: dict[str, str]) -> tuple[KeyAccount, ...]:
    """Adds the values of the run's DeepSpeed config; the command line takes precedence."""
    parallel = values.get("parallel")
    name = parallel.get("deepspeed") if isinstance(parallel, dict) else None
    if not isinstance(name, str) or not name:
        return ()
    from shardwise.config.deepspeed import merge, read_config

    path = Path(name).expanduser()
    return merge(values, origin, read_config(path), expected_ranks(values), path.name)


def from_deepspeed(file: Path, source: Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> str:
    """The RUN.yaml equivalent to a DeepSpeed config, merged with a run if given; verified to load."""
    from shardwise.config.deepspeed import as_yaml, read_config, translate

    values, _, _, _ = read_values({} if source is None else source, overrides)
    translation = translate(read_config(file), ranks=expected_ranks(values), run=values, file=file.name)
    text = as_yaml(translation, values, str(file))
    load_run(yaml.load(text, _Loader))
    return text


def expected_ranks(values: dict[str, Any]) -> int:
    """Number of ranks of a run before validation, used to check the batch of a DeepSpeed config."""
    launched = os.environ.get("WORLD_SIZE", "")
    ranks = values.get("ranks", "auto")
    if launched.isdecimal():
        return max(1, int(launched))
    if isinstance(ranks, int) and ranks > 0:
        return ranks
    import torch

    return torch.cuda.device_count() if values.get("device") != "cpu" and torch.cuda.is_available() else 1


class _Loader(BoundedLoader):
    """YAML loader that reads `2025-01-31` as text rather than a date, and `1e-5` as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_yaml(path: Path, origin: dict[str, str]) -> dict[str, Any]:
    if not path.exists():
        near = near_file(path, "*.y*ml")
        hint = "give the path of a RUN.yaml; `shardwise demo --write RUN.yaml` makes one"
        hint = f"did you mean {near}?" if near else hint
        raise UserError("RUN.yaml", str(path), "there is no such file", hint)
    if path.is_dir():
        raise UserError("RUN.yaml", str(path), "this is a folder", "give the path of the YAML file itself")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text ({error.reason} at byte {error.start})"
        raise UserError("RUN.yaml", str(path), problem, "give a YAML file, saved as UTF-8") from None
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise UserError("RUN.yaml", str(path), problem, "change its permissions, or give another file") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
        loader = _Loader(text)
        try:
            values = _construct(loader, node, "", path.name, origin) if node is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        where, problem = _yaml_problem(error, path)
        remedy = "check the indentation, colons, quotes and tabs on this line"
        raise UserError("RUN.yaml", where, f"not valid YAML: {problem}", remedy) from None
    if values is None:
        raise UserError("RUN.yaml", str(path), "holds no settings", f"write at least {_LEAST}")
    if not isinstance(values, dict):
        problem = f"holds a {type(values).__name__} instead of settings"
        raise UserError("RUN.yaml", str(path), problem, f"write key: value lines, at least {_LEAST}")
    return values


def _yaml_problem(error: yaml.YAMLError, path: Path) -> tuple[str, str]:
    """Location and reason; for an unclosed bracket or quote, also where it was opened."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(path), str(error).partition("\n")[0]
    line = error.problem_mark.line
    begun = error.context_mark
    problem = error.problem or "no reason given"
    if begun is not None and begun.line != line:
        problem += f" ({error.context}, begun on line {begun.line + 1})"
    return f"{path}:{line + 1}", problem


_LEAST = "model: smollm2-135m-instruct and data: {train: chat.jsonl}"


def _construct(loader: yaml.SafeLoader, node: yaml.Node, prefix: str, name: str, origin: dict[str, str]) -> Any:
    """Builds plain values, records the line of each key, and rejects duplicate keys (YAML keeps the last)."""
    if prefix:
        origin[prefix] = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        own = [key for key, _ in node.value if not key.tag.endswith(":merge")]
        if len(own) < len(node.value):  # `<<: *anchor`: the anchor's pairs come first, and the mapping's own win
            loader.flatten_mapping(node)
        keys: set[str] = set()
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            path = f"{prefix}.{key}" if prefix else key
            if key in keys:
                problem = f"given twice (again at {name}:{key_node.start_mark.line + 1})"
                raise UserError(path, None, problem, "keep one of the two")
            if any(key_node is k for k in own):
                keys.add(key)
            result[key] = _construct(loader, value_node, path, name, origin)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, f"{prefix}.{i}", name, origin) for i, item in enumerate(node.value)]
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:  # text that looks like a number to YAML's patterns, but is none
        raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


def _override(values: dict[str, Any], text: str, origin: dict[str, str], spelled: dict[str, str]) -> list[str]:
    """Applies one override; returns the notes on old names."""
    written, sign, raw = text.partition("=")
    written = written.strip()
    key = new_path(written, FORMER_PLACES)
    if spelled.setdefault(key, written) != written:
        raise both_given(written if written != key else spelled[key], key, "command line")
    if not sign or not all(key.split(".")):
        raise UserError("override", text, "is not of the form key.path=value", "write e.g. train.learning_rate=1e-4")
    if not raw.strip() and takes_text(key):
        problem = "is given no value (on the command line; an unset variable?)"
        raise UserError(key, raw, problem, "give a value, or leave it out")
    try:
        value = yaml.load(raw, _Loader) if raw.strip() else None
    except (yaml.YAMLError, ValueError):
        value = raw
    settings, notes = rename_override(written, value, FORMER_PLACES)
    for path, item in settings:
        _assign(values, path, item, raw, origin)
    return notes


def _assign(values: dict[str, Any], key: str, value: Any, raw: str, origin: dict[str, str]) -> None:
    """Sets what an override gives; `raw`: as it was written."""
    *parents, leaf = key.split(".")
    place: Any = values
    for depth, part in enumerate(parents):
        place = _step_into(place, part, parents[:depth], key, raw)
    if isinstance(place, list):
        place[_index(place, leaf, parents, key, raw)] = value
    else:
        place[leaf] = {"name": value} if (key == "model" and isinstance(value, str)) else value
    for below in [path for path in origin if path.startswith(key + ".")]:
        del origin[below]
    origin[key] = "command line"
    if isinstance(value, dict):
        _note(value, key, "command line", origin)


def _step_into(place: Any, part: str, above: list[str], key: str, raw: str) -> Any:
    """The container at `part` that an override writes into; a short form is expanded."""
    index: Any = _index(place, part, above, key, raw) if isinstance(place, list) else part
    child = place[index] if isinstance(place, list) else place.get(part)
    if isinstance(child, str) and above == ["data"] and part in ("train", "eval"):
        child = [{"path": child}]
    elif isinstance(child, str) and above in (["data", "train"], ["data", "eval"]):
        child = {"path": child}
    elif isinstance(child, str) and not above and part in ("method", "objective"):
        child = {"type": child}
    elif isinstance(child, str) and not above and part == "diloco":
        child = {"server": child}
    elif not isinstance(child, (dict, list)):
        child = {}
    place[index] = child
    return child


def _index(place: list[Any], part: str, above: list[str], key: str, raw: str) -> int:
    if part.isdigit() and int(part) < len(place):
        return int(part)
    remedy = f"use an index from 0 to {len(place) - 1}" if place else f"set {'.'.join(above)} as a whole"
    raise UserError(f"override {key}", raw, f"{'.'.join(above)} is a list of {len(place)}", remedy)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _note(value: Any, prefix: str, where: str, origin: dict[str, str]) -> None:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        path = f"{prefix}.{key}" if prefix else str(key)
        origin[path] = where
        if isinstance(item, (dict, list)):
            _note(item, path, where, origin)
