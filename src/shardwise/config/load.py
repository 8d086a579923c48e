"""Reads RUN.yaml and the overrides, remembers where each value came from, and explains what is wrong.

`load_run` is the only way in: file, then `key.path=value` overrides, then defaults. Every value of the result has an
origin ("run.yaml:12", "command line", "default"), which `shardwise config` prints and error messages cite.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from shardwise.config.schema import Run
from shardwise.errors import UserError


@dataclass(frozen=True)
class LoadedRun:
    """A validated run and the origin of each value it was given."""

    run: Run
    origin: dict[str, str] = field(default_factory=dict)

    def origin_of(self, path: str) -> str:
        """Where the value at a dotted path came from; a whole section's origin serves its parts."""
        while path:
            if path in self.origin:
                return self.origin[path]
            path = path.rpartition(".")[0]
        return "default"


def load_run(source: str | Path | dict[str, Any] | Run, overrides: list[str] | tuple[str, ...] = ()) -> LoadedRun:
    """Reads, overrides and validates a run; raises UserError with field, value and remedy."""
    if isinstance(source, Run):
        source = source.model_dump()
    origin: dict[str, str] = {}
    if isinstance(source, dict):
        values, base = _plain(source), "the given dict"
        _note(values, "", "given", origin)
    else:
        values, base = _read_yaml(Path(source), origin), str(source)
    if isinstance(values.get("model"), str):
        values["model"] = {"name": values["model"]}
        origin["model.name"] = origin.get("model", "given")
    for override in overrides:
        _override(values, override, origin)
    try:
        return LoadedRun(Run.model_validate(values), origin)
    except ValidationError as error:
        raise _explain(error, origin, base) from None


def _read_yaml(path: Path, origin: dict[str, str]) -> dict[str, Any]:
    if not path.exists():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else [])
        hint = f"did you mean {path.parent / near[0]}?" if near else "give the path of a RUN.yaml; `shardwise demo --write RUN.yaml` makes one"
        raise UserError("RUN.yaml", str(path), "there is no such file", hint)
    if path.is_dir():
        raise UserError("RUN.yaml", str(path), "this is a folder", "give the path of the YAML file itself")
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, PermissionError) as error:
        raise UserError("RUN.yaml", str(path), f"cannot be read as text ({error})", "save it as UTF-8 and make it readable") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        loader = yaml.SafeLoader(text)
        try:
            values = _construct(loader, node, "", path.name, origin) if node is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise UserError(where, None, f"not valid YAML: {problem}", "check the indentation, colons and quotes on this line") from None
    if not isinstance(values, dict):
        raise UserError(str(path), None, "holds no settings", "write at least model: and data:; see `shardwise train --help`")
    return values


def _construct(loader: yaml.SafeLoader, node: yaml.Node, prefix: str, name: str, origin: dict[str, str]) -> Any:
    """Builds plain values while noting the line of each key, and refuses a key given twice (YAML keeps the last)."""
    if prefix:
        origin[prefix] = f"{name}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))  # type: ignore[no-untyped-call]
            path = f"{prefix}.{key}" if prefix else key
            if key in result:
                raise UserError(path, None, f"given twice (again at {name}:{key_node.start_mark.line + 1})", "keep one of the two")
            result[key] = _construct(loader, value_node, path, name, origin)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, f"{prefix}.{i}", name, origin) for i, item in enumerate(node.value)]
    return loader.construct_object(node, deep=True)  # type: ignore[no-untyped-call]


def _override(values: dict[str, Any], text: str, origin: dict[str, str]) -> None:
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise UserError("override", text, "is not of the form key.path=value", "write e.g. train.learning_rate=1e-4")
    try:
        value = yaml.safe_load(raw) if raw.strip() else None
    except yaml.YAMLError:
        value = raw
    *parents, leaf = key.strip().split(".")
    if parents == ["model"] or not parents:
        for shorthand in [p for p in origin if p.startswith(key + ".")]:
            del origin[shorthand]
    place: Any = values
    for depth, part in enumerate(parents):
        here = place.get(part) if isinstance(place, dict) else place[int(part)] if part.isdigit() and int(part) < len(place) else None
        if isinstance(here, str) and part in ("train", "eval") and depth == 1:
            here = [{"path": here}]
        if not isinstance(here, (dict, list)):
            here = {}
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                raise UserError(f"override {key}", raw, f"{'.'.join(parents[:depth])} is a list of {len(place)}", f"use an index from 0 to {len(place) - 1}")
            place[int(part)] = here
        else:
            place[part] = here
        place = here
    if isinstance(place, list):
        if not leaf.isdigit() or int(leaf) >= len(place):
            raise UserError(f"override {key}", raw, f"{'.'.join(parents)} is a list of {len(place)}", f"use an index from 0 to {len(place) - 1}")
        place[int(leaf)] = value
    else:
        place[leaf] = {"name": value} if (key.strip() == "model" and isinstance(value, str)) else value
    origin[key.strip()] = "command line"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _note(value: Any, prefix: str, where: str, origin: dict[str, str]) -> None:
    for key, item in value.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        origin[path] = where
        if isinstance(item, dict):
            _note(item, path, where, origin)


def _explain(error: ValidationError, origin: dict[str, str], base: str) -> UserError:
    """One message for the first mistake: the field as written, its place, and the nearest thing that would be right."""
    details = error.errors()
    first = min(details, key=_priority)
    path = _field_path(first["loc"])
    where = next((origin[p] for p in _ancestors(path) if p in origin), base)
    more = f" (and {len({_field_path(d['loc']) for d in details} - {path})} more)" if len({_field_path(d["loc"]) for d in details}) > 1 else ""
    value, kind = first["input"], first["type"]
    if kind == "extra_forbidden":
        known = sorted(_keys_at(first["loc"][:-1]))
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5) or _elsewhere(str(first["loc"][-1]))
        remedy = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return UserError(path, value, f"unknown key at {where}{more}", remedy)
    if kind == "missing":
        return UserError(path, None, f"is required but {base} does not set it{more}", _EXAMPLES.get(path, f"add {path}: …"))
    problem = first["msg"].removeprefix("Value error, ")
    problem = problem[:1].lower() + problem[1:]
    return UserError(path or base, None if isinstance(value, (dict, BaseModel)) else value, f"{problem} (at {where}){more}", _remedy(path, first))


_EXAMPLES = {
    "model": "add e.g. model: smollm2-135m-instruct",
    "data": "add e.g. data: {train: chat.jsonl}",
    "data.train": "add e.g. data: {train: chat.jsonl}",
}


def _remedy(path: str, detail: Any) -> str:
    if allowed := detail.get("ctx", {}).get("expected"):
        return f"use one of {allowed}"
    description = ""
    for depth, field_info in enumerate(_fields_along(path)):
        description = field_info.description or description if depth >= path.count(".") else description
    return f"{path}: {description}" if description else "see `shardwise config --schema` for what is allowed here"


def _fields_along(path: str) -> list[Any]:
    found, section = [], Run
    for part in path.split("."):
        if not isinstance(section, type) or part not in getattr(section, "model_fields", {}):
            break
        info = section.model_fields[part]
        found.append(info)
        section = _section_in(info.annotation) or section
    return found


def _section_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        if (inner := _section_in(part)) is not None:
            return inner
    return None


def _keys_at(loc: tuple[int | str, ...]) -> set[str]:
    section: Any = Run
    for part in loc:
        if isinstance(part, str) and part in getattr(section, "model_fields", {}):
            section = _section_in(section.model_fields[part].annotation) or section
    return set(section.model_fields)


def _elsewhere(key: str) -> list[str]:
    """The full path of a key that exists in another section: people write `learning_rate:` at the top."""
    paths = list(Run.model_fields)
    for name, info in Run.model_fields.items():
        if (section := _section_in(info.annotation)) is not None:
            paths += [f"{name}.{k}" for k in section.model_fields]
    leaves = {p.rpartition(".")[2]: p for p in reversed(paths)}
    near = difflib.get_close_matches(key, list(leaves), n=1, cutoff=0.75)
    return [leaves[near[0]]] if near else []


def _priority(detail: Any) -> tuple[int, int]:
    order = {"extra_forbidden": 0, "missing": 2}
    return order.get(detail["type"], 1), len(detail["loc"])


def _field_path(loc: tuple[int | str, ...]) -> str:
    """Drops the markers pydantic adds for unions and validators, keeping what the user wrote."""
    parts: list[str] = []
    for part in loc:
        if isinstance(part, int):
            parts.append(str(part))
        elif "[" not in part and "(" not in part and part not in ("int", "float", "str", "bool", "literal", "constrained-int"):
            parts.append(part)
    return ".".join(parts)


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
