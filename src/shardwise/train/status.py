"""A status line per rank, in a file, so that it outlives the rank.

A rank that is killed cannot explain itself; the supervisor reads this line instead.
"""

from __future__ import annotations

import os
from pathlib import Path

WIDTH = 80


class Status:
    """Overwrites one short line in place: a step and an activity."""

    def __init__(self, file: Path | None) -> None:
        self._handle: int | None = None
        if file is not None:
            self._handle = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self.step = 0
        self.set("starting")

    def set(self, doing: str, step: int | None = None) -> None:
        """Writes the activity that begins now, and the step unless it is the same."""
        self.doing = doing
        if step is not None:
            self.step = step
        if self._handle is not None:
            os.pwrite(self._handle, f"{self.step}\t{self.doing}".ljust(WIDTH)[:WIDTH].encode(), 0)

    def beat(self) -> None:
        """Shows the supervisor that this process can still run code: the file's time is now."""
        if self._handle is not None:
            os.utime(self._handle)


def read_status(file: Path) -> tuple[int, str]:
    """The last step and activity that a rank wrote; (0, "starting") if unreadable."""
    try:
        step, _, doing = file.read_text().strip().partition("\t")
        return int(step), doing.strip()
    except (OSError, ValueError):
        return 0, "starting"


def logs_of(output: Path) -> Path:
    """The folder of the ranks' logs and status files."""
    return output / "logs"


STACKS = "stacks.txt"  # stacks of all ranks of a run that stalled
