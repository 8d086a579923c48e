"""Markdown from values that nobody checked: names of files and sources may hold anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(r"([\\`*_\[\]|~$])")


def text(value: object, most: int = 200) -> str:
    """A value as plain words: one line, nothing in it is markup."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    line = line if len(line) <= most else line[: most - 1] + "…"
    return _SPECIAL.sub(r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; the first column is words, the others are set to the right."""
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(text(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)
