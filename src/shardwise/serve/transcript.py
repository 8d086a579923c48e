"""Conversations on disk: lines of chat JSONL, the format that `shardwise train` reads."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.core.errors import UserError
from shardwise.nn.generate import Message

Turns = list[tuple[str, str]]


def append_chat_row(path: Path, messages: list[Message]) -> None:
    """Appends a conversation to a chat JSONL file, new or existing; any other file is rejected unchanged."""
    row = json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"
    try:
        if path.exists():
            if not (path.is_file() and _holds_chat_rows(path)):
                raise UserError("/save", str(path), "exists and is no chat JSONL file", "choose another name")
            with path.open("rb") as file:
                if file.seek(0, 2) > 0:
                    file.seek(-1, 2)
                    row = row if file.read(1) == b"\n" else b"\n" + row
        with path.open("ab") as file:
            file.write(row)
    except OSError as error:
        raise UserError("/save", str(path), error.strerror or str(error), "choose a file you may write") from None


def _holds_chat_rows(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(2**26)  # a binary file may have no line end at all
    if not first:
        return True
    try:
        row = json.loads(first)
    except ValueError:
        return False
    return isinstance(row, dict) and "messages" in row


def read_chat_row(path: Path) -> tuple[str | None, Turns]:
    """Returns system message and turns of the last conversation in a chat JSONL file."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        messages = [(message["role"], message["content"]) for message in json.loads(lines[-1])["messages"]]
    except OSError as error:
        raise UserError("/load", str(path), error.strerror or str(error), "name a file that /save wrote") from None
    except (ValueError, LookupError, TypeError):
        raise UserError("/load", str(path), "is no chat JSONL file", "name a file that /save wrote") from None
    system = messages.pop(0)[1] if messages and messages[0][0] == "system" else None
    roles = [role for role, _ in messages]
    if roles != ["user", "assistant"] * (len(roles) // 2) or not all(isinstance(text, str) for _, text in messages):
        problem = "its last conversation does not alternate between user and assistant"
        raise UserError("/load", str(path), problem, "name a file that /save wrote")
    texts = [text for _, text in messages]
    return system, list(zip(texts[::2], texts[1::2], strict=True))
