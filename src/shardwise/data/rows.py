"""Reads sources into rows and says what each row is; every complaint names file and line."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.schema import Source
from shardwise.errors import UserError

TEXT_SUFFIXES = {".txt", ".md"}
ROW_SUFFIXES = {".jsonl", ".ndjson"}
ROLES = {"system", "user", "assistant", "tool"}


@dataclass(frozen=True)
class Row:
    """One example: a conversation (messages) or a text, and where it stands."""

    where: str
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None


def source_files(source: Source, field: str) -> list[Path]:
    """The files a source names, sorted; an unknown kind or an empty match is the user's mistake."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES | ROW_SUFFIXES)
    elif glob.has_magic(source.path):
        files = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    else:
        files = [path]
    if not files:
        raise UserError(field, source.path, "matches no .jsonl, .txt or .md file", "check the pattern and the current folder")
    for file in files:
        if not file.is_file():
            raise UserError(field, str(file), "there is no such file", f"paths are relative to {Path.cwd()}")
        if file.suffix not in TEXT_SUFFIXES | ROW_SUFFIXES:
            raise UserError(field, str(file), f"files of kind {file.suffix or '(no suffix)'} are not understood",
                            "use .jsonl with messages or text, or .txt / .md")  # fmt: skip
    return files


def read_rows(source: Source, field: str) -> Iterator[Row]:
    """Every example of a source, in order."""
    for file in source_files(source, field):
        try:
            if file.suffix in TEXT_SUFFIXES:
                if source.format == "chat":
                    raise UserError(f"{field}.format", "chat", f"{file} is plain text", "use a .jsonl file with messages, or format: text")
                yield Row(str(file), text=file.read_text(encoding="utf-8-sig"))
            else:
                yield from _read_jsonl(file, source, field)
        except UnicodeDecodeError as error:
            raise UserError(field, str(file), f"is not UTF-8 text ({error.reason} at byte {error.start})", "convert it to UTF-8") from None
        except PermissionError:
            raise UserError(field, str(file), "may not be read", "change its permissions") from None


def _read_jsonl(file: Path, source: Source, field: str) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                raise UserError(field, where, f"this line is not JSON ({error})", "mend or delete the line; each line is one JSON object") from None
            yield _row(value, where, source, field)


def _row(value: Any, where: str, source: Source, field: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(field, where, f"a row must be a JSON object, this is a {type(value).__name__}", 'write {"messages": […]} or {"text": "…"}')
    kind = source.format
    if kind == "auto":
        kind = "chat" if "messages" in value else "text" if "text" in value else "none"
    if kind == "chat":
        return Row(where, messages=_messages(value.get("messages"), where, field))
    if kind == "text":
        if not isinstance(value.get("text"), str):
            raise UserError(field, where, 'the row has no string under "text"', 'give each row a "text", or use format: chat')
        return Row(where, text=value["text"])
    keys = ", ".join(sorted(map(str, value))[:8]) or "none"
    raise UserError(field, where, f"the row has neither messages nor text (its keys: {keys})", 'rename the column to "messages" (chat) or "text"')


def _messages(value: Any, where: str, field: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise UserError(field, where, '"messages" must be a list with at least one message', 'write [{"role": "user", "content": "…"}, …]')
    for index, message in enumerate(value):
        here = f"{where} message {index + 1}"
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UserError(field, here, "a message needs role and content, both strings", "images, audio and tool calls are not supported yet")
        if message.get("role") not in ROLES:
            raise UserError(field, here, f"unknown role {message.get('role')!r}", f"use one of {', '.join(sorted(ROLES))}")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)
