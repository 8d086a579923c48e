"""References written from the code: every key of RUN.yaml, every command with its options."""

from __future__ import annotations

import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from shardwise.config.advanced import DEEPSPEED_ONLY, written

HEADER = ["| key | kind | default | meaning |", "| --- | --- | --- | --- |"]


def config_page() -> str:
    """Every key of RUN.yaml: its kind, default and meaning."""
    from shardwise.config.advanced import FORMER_PLACES
    from shardwise.config.json_schema import DESCRIPTION
    from shardwise.config.schema import Run

    lines = ["# RUN.yaml, key by key", "", "Written from the code, as `shardwise config --schema` is.", ""]
    lines += [*HEADER, *(row for path, row in _rows(Run, "") if written(path) == path)]
    lines += ["", "## advanced", "", f"{DESCRIPTION[0].upper()}{DESCRIPTION[1:]}.", "", *HEADER]
    lines += [row for path, row in _rows(Run, "") if written(path) != path]
    lines += ["", "## Renamed settings", "", "The old name works until the next release, with a note.", ""]
    lines += ["| old | new |", "| --- | --- |", *(f"| `{old}` | `{new}` |" for old, new in FORMER_PLACES.items())]
    return "\n".join(lines) + "\n"


def _rows(model: type[BaseModel], prefix: str) -> list[tuple[str, str]]:
    """Path in Run and row of each key, under the name that RUN.yaml has it by."""
    rows = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if path in DEEPSPEED_ONLY:
            continue
        nested = [] if f"{path}." in DEEPSPEED_ONLY else _sections(field.annotation)
        default = "" if field.default is PydanticUndefined or nested else f"`{_shown(field.default)}`"
        kind = "" if nested else f"`{_kind(field.annotation)}`"
        cells = [f"`{written(path)}`", _cell(kind), _cell(default), _cell(field.description or "")]
        rows.append((path, f"| {' | '.join(cells)} |"))
        for one in nested:
            rows += [row for row in _rows(one, f"{path}.") if row not in rows]
    return rows


def _sections(kind: Any) -> list[type[BaseModel]]:
    """The sections that a key may hold."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [one for part in get_args(kind) for one in _sections(part)] if get_origin(kind) is not None else []


def _kind(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(_kind(part) for part in get_args(kind) if not _sections(part))
    if get_origin(kind) is Annotated:
        return _kind(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return " | ".join(str(value) for value in get_args(kind))
    text = getattr(kind, "__name__", str(kind)) if get_origin(kind) is None else str(kind)
    return text.replace("typing.", "").replace("NoneType", "null")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def commands_page() -> str:
    """Every command as its --help shows it."""
    import typer.main

    from shardwise.cli.main import app

    group: Any = typer.main.get_command(app)
    lines = ["# Options of every command", "", "Written from the code: what `--help` shows.", ""]
    for path, command in _commands(group, "shardwise"):
        if command.hidden:
            continue
        lines += [f"## {path}", "", _prose(command.help or ""), ""]
        options = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
        if options:
            lines += ["| option | meaning |", "| --- | --- |"]
        for one in options:
            name = ", ".join(one.opts) if one.param_type_name == "option" else str(one.metavar or one.name)
            lines.append(f"| `{_cell(name)}` | {_cell(getattr(one, 'help', '') or '')} |")
        lines += ["", *_examples(command), ""]
    return "\n".join(lines) + "\n"


def _commands(group: Any, path: str) -> list[tuple[str, Any]]:
    found = []
    for name, command in group.commands.items():
        found.append((f"{path} {name}", command))
        if hasattr(command, "commands"):
            found += _commands(command, f"{path} {name}")
    return found


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in text.replace("\b", "").splitlines())


def _examples(command: Any) -> list[str]:
    epilog = re.sub(r"\[/?\w+\]", "", (command.epilog or "").replace("\b", "")).strip()  # rich's colours
    return ["```", *(line.strip() for line in epilog.splitlines()[1:] if line.strip()), "```"] if epilog else []
