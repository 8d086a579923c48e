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
        files = sorted(p for p in path.rglob("*") if p.is_file() and _known(p))
    elif glob.has_magic(source.path) and not path.exists():
        files = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    else:
        files = [path]
    if not files:
        remedy = f"check the pattern; paths are relative to {Path.cwd()}"
        raise UserError(field, source.path, "matches no .jsonl, .txt or .md file", remedy)
    for file in files:
        if not file.is_file():
            raise UserError(field, str(file), "there is no such file", f"paths are relative to {Path.cwd()}")
        if not _known(file):
            problem = f"files of kind {file.suffix or '(no suffix)'} are not understood"
            raise UserError(field, str(file), problem, "use .jsonl with messages or text, or .txt / .md")
    return files


def _known(file: Path) -> bool:
    return file.suffix.lower() in TEXT_SUFFIXES | ROW_SUFFIXES


def read_rows(source: Source, field: str) -> Iterator[Row]:
    """Every example of a source, in order."""
    for file in source_files(source, field):
        try:
            if file.suffix.lower() in TEXT_SUFFIXES:
                yield _read_text(file, source, field)
            else:
                yield from _read_jsonl(file, source, field)
        except OSError as error:
            raise unreadable(error, file, field) from None


def unreadable(error: OSError, file: Path, field: str) -> UserError:
    """A file that is there but does not open."""
    return UserError(field, str(file), f"cannot be read ({error.strerror})", "change its permissions, or leave it out")


def _read_text(file: Path, source: Source, field: str) -> Row:
    if source.format == "chat":
        remedy = "use a .jsonl file with messages, or format: text"
        raise UserError(f"{field}.format", "chat", f"{file} is plain text", remedy)
    try:
        return Row(str(file), text=file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_text(error, str(file), field) from None


def _read_jsonl(file: Path, source: Source, field: str) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{file}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_text(error, where, field) from None
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                remedy = "mend or delete the line; each line is one JSON object"
                raise UserError(field, where, f"this line is not JSON ({error})", remedy) from None
            yield _row(value, where, source, field)


def _not_text(error: UnicodeDecodeError, where: str, field: str) -> UserError:
    return UserError(field, where, f"is not UTF-8 text ({error.reason})", "convert the file to UTF-8")


def _row(value: Any, where: str, source: Source, field: str) -> Row:
    if not isinstance(value, dict):
        problem = f"a row must be a JSON object, this is a {type(value).__name__}"
        raise UserError(field, where, problem, 'write {"messages": […]} or {"text": "…"}, one per line')
    if source.format == "chat" or (source.format == "auto" and "messages" in value):
        return Row(where, messages=_messages(value.get("messages"), where, field))
    if source.format == "text" or "text" in value:
        if not isinstance(value.get("text"), str):
            remedy = 'give each row a "text", or use format: chat'
            raise UserError(field, where, 'the row has no string under "text"', remedy)
        return Row(where, text=_whole(value["text"], where, field))
    keys = ", ".join(sorted(map(str, value))[:8]) or "none"
    problem = f"the row has neither messages nor text (its keys: {keys})"
    raise UserError(field, where, problem, 'rename the column to "messages" (chat) or "text"')


def _messages(value: Any, where: str, field: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        problem = '"messages" must be a list with at least one message'
        raise UserError(field, where, problem, 'write "messages": [{"role": "user", "content": "…"}, …]')
    for index, message in enumerate(value):
        here = f"{where} message {index + 1}"
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            remedy = "images, audio and tool calls are not supported yet: leave such rows out"
            raise UserError(field, here, "a message needs role and content, both strings", remedy)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise UserError(field, here, f"unknown role {role!r}", f"use one of {', '.join(sorted(ROLES))}")
        _whole(message["content"], here, field)
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def _whole(text: str, where: str, field: str) -> str:
    """JSON can carry halves of a character (a lone `\\ud83d`), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"holds half of a surrogate pair (\\u{ord(text[error.start]):04x} at character {error.start + 1})"
        raise UserError(field, where, problem, "write the whole character, or delete the row") from None
    return text
