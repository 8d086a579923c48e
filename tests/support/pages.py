"""What README and docs tell people to do: their commands, and their blocks of YAML, Python and JSON."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/site/index.md", *(ROOT / "docs").glob("*.md")]
)
PROGRAMS = (
    "shardwise",
    "python",
    "pytest",
    "make",
    "torchrun",
    "pip",
    "apt-get",
    "cat",
    "curl",
    "export",
    "pre-commit",
)
SHELL = ("bash", "sh", "console", "shell")
TREE = re.compile(r"shardwise \w+:")  # a line of the README's tree
ASSIGNED = re.compile(r"^(?:[A-Z_]+=\S* +)*")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        """For people."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line that someone may type."""

    text: str
    where: str
    fenced: bool

    @property
    def words(self) -> list[str]:
        """Of its first program, without variables before it, dots for "and so on", pipes and what follows."""
        words = shlex.split(ASSIGNED.sub("", self.text))
        end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&")), len(words))
        return [word for word in words[:end] if "…" not in word and not word.startswith("[")]


def blocks(*languages: str) -> list[Block]:
    """Every fenced block in one of these languages ("" is none)."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^( *)```([^\n`]*)\n(.*?)^ *```", text, re.M | re.S):
            name = match[2].strip()
            if name in languages:
                line = text[: match.start()].count("\n") + 2
                found.append(Block(str(page.relative_to(ROOT)), line, name, match[3]))
    return found


def commands() -> list[Command]:
    """Every command: lines of fenced blocks that begin with a program, and spans of code that do and have arguments."""
    found: dict[str, Command] = {}
    for block in blocks("", "text", *SHELL):
        joined = re.sub(r"\\\n\s*", " ", block.text)
        for line in joined.splitlines():
            text = _bare(line.removeprefix("$ ") if block.language == "text" else line)
            shown = block.language != "text" or line.startswith("$ ")
            if text and shown and not TREE.match(text) and (_program(text) in PROGRAMS or block.language in SHELL):
                found.setdefault(text, Command(text, block.where, True))
    for page in PAGES:
        prose = re.sub(r"^( *)```.*?^ *```", lambda m: "\n" * m[0].count("\n"), page.read_text(), flags=re.M | re.S)
        for match in re.finditer(r"`([^`]+)`", prose):
            text = _bare(" ".join(match[1].split()))
            if _program(text) in PROGRAMS[:5] and " " in text:
                where = f"{page.relative_to(ROOT)}:{prose[: match.start()].count(chr(10)) + 1}"
                found.setdefault(text, Command(text, where, False))
    return list(found.values())


def _bare(line: str) -> str:
    """Without a comment at its end."""
    return re.sub(r"\s+#\s.*$", "", re.sub(r"^#\s.*$", "", line)).strip()


def _program(text: str) -> str:
    return ASSIGNED.sub("", text).partition(" ")[0]
