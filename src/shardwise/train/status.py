"""A line per rank that says what it is doing, kept in a file so that it outlives the rank.

When a rank is killed it cannot explain itself; the supervisor reads this line instead.
"""

from __future__ import annotations

import os
from pathlib import Path

WIDTH = 80


class Status:
    """Overwrites one short line in place: a step and an activity."""

    def __init__(self, file: Path | None) -> None:
        self._handle = (
            os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            if file is not None
            else None
        )
        self.step, self.doing = 0, "starting"
        self.set("starting")

    def set(self, doing: str, step: int | None = None) -> None:
        """Says what comes next."""
        self.doing, self.step = doing, self.step if step is None else step
        if self._handle is not None:
            os.pwrite(self._handle, f"{self.step}\t{self.doing}".ljust(WIDTH)[:WIDTH].encode(), 0)


def read_status(file: Path) -> tuple[int, str]:
    """The last words of a rank: step and activity."""
    try:
        step, _, doing = file.read_text().strip().partition("\t")
        return int(step), doing.strip()
    except (OSError, ValueError):
        return 0, "starting"


def logs_of(output: Path) -> Path:
    """Where the ranks' logs, notes and last words lie."""
    return output / "logs"


STACKS = "stacks.txt"  # of a run that stalled
