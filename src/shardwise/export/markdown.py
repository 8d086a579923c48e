"""Markdown from unchecked values: names of files and sources may hold anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")


def text(value: object, limit: int = 200) -> str:
    """Returns a value as plain text on one line, with markup escaped."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    line = line if len(line) <= limit else line[: limit - 1] + "…"
    return _SPECIAL.sub(r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table; the first column is left-aligned, the others right-aligned."""
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(text(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
