"""Which folders are runs: those named on the command line, and those below them that hold a metrics.jsonl.

The runs that were found are all that is ever served: a request names one by its id, never by a path.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shardwise.core.errors import UserError
from shardwise.watch.folder import RunFolder

DEPTH = 5  # folders below the one that was named
MOST_RUNS = 500
MOST_FOLDERS = 20_000  # looked into: a home folder must not keep the page waiting
SCAN = 5.0  # seconds between two searches
INSIDE = frozenset({"checkpoints", "logs", "model", "merged", "offload", "node_modules", "__pycache__"})


class Finder:
    """The runs below some folders, looked for again now and then: new ones come up while one watches."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.expanduser().absolute() for root in roots]
        self._runs: dict[str, RunFolder] = {}
        self._looked = float("-inf")
        self._lock = threading.Lock()

    def runs(self) -> list[RunFolder]:
        """Every run, by name."""
        with self._lock:
            if time.monotonic() - self._looked >= SCAN:
                self._look()
                self._looked = time.monotonic()
            return sorted(self._runs.values(), key=lambda run: run.name)

    def get(self, key: str) -> RunFolder | None:
        """A run by its id; None for anything else."""
        found = self._runs.get(key)
        if found is None:
            self.runs()
            found = self._runs.get(key)
        return found

    def _look(self) -> None:
        there: dict[str, RunFolder] = {}
        known = {run.path: run for run in self._runs.values()}
        for root in self.roots:
            for folder in find_runs(root):
                if len(there) < MOST_RUNS:
                    run = known.get(folder) or RunFolder(folder, _name(root, folder, len(self.roots) > 1))
                    there[run.id] = run
        self._runs = there


def find_runs(root: Path) -> list[Path]:
    """The run folders at or below a folder."""
    if is_run(root):
        return [root]
    found, level, seen = [], [root], 0
    for _ in range(DEPTH):
        below: list[Path] = []
        for folder in level:
            try:
                # Links are not followed: a circle of them would never end, and they lead out of what was asked for.
                inner = sorted(e.path for e in os.scandir(folder) if e.is_dir(follow_symlinks=False))
            except OSError:
                continue
            for path in map(Path, inner):
                seen += 1
                if path.name.startswith(".") or path.name in INSIDE or seen > MOST_FOLDERS:
                    continue
                if is_run(path):
                    found.append(path)
                else:
                    below.append(path)
        level = below
    return found


def is_run(folder: Path) -> bool:
    """Whether a run has written here; one that has just begun has no metrics yet."""
    return (folder / "metrics.jsonl").is_file() or ((folder / "job.json").is_file() and (folder / "logs").is_dir())


def check_roots(roots: Sequence[Path]) -> list[Path]:
    """The folders to look in, which must be there."""
    for root in roots:
        if not root.expanduser().is_dir():
            remedy = "name a run's output folder, or one that holds several"
            raise UserError("FOLDER", str(root), "is no folder", remedy)
    return list(roots)


def _name(root: Path, folder: Path, several: bool) -> str:
    """How a run is called: by its path below the folder that was named."""
    if folder == root:
        return folder.name
    inner = folder.relative_to(root).as_posix()
    return f"{root.name}/{inner}" if several else inner
