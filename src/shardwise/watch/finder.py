"""Finds run folders: those named on the command line, and those below them with a metrics.jsonl.

Only runs found here are ever served: a request names one by its id, never by a path.
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
    """The runs below some folders, rescanned periodically so that new ones appear."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.expanduser().absolute() for root in roots]
        self._runs: dict[str, RunFolder] = {}
        self._looked = float("-inf")
        self._lock = threading.Lock()

    def runs(self) -> list[RunFolder]:
        """All runs, sorted by name."""
        with self._lock:
            if time.monotonic() - self._looked >= SCAN:
                self._look()
                self._looked = time.monotonic()
            return sorted(self._runs.values(), key=lambda run: run.name)

    def get(self, key: str) -> RunFolder | None:
        """A run by its id; None if there is none."""
        run = self._runs.get(key)
        if run is None:
            self.runs()
            run = self._runs.get(key)
        return run

    def _look(self) -> None:
        runs: dict[str, RunFolder] = {}
        known = {run.path: run for run in self._runs.values()}
        for root in self.roots:
            for folder in find_runs(root):
                if len(runs) < MOST_RUNS:
                    run = known.get(folder) or RunFolder(folder, _name(root, folder, len(self.roots) > 1))
                    runs[run.id] = run
        self._runs = runs


def find_runs(root: Path) -> list[Path]:
    """Run folders at or below a folder."""
    if is_run(root):
        return [root]
    runs = []
    level = [root]
    visited = 0
    for _ in range(DEPTH):
        below: list[Path] = []
        for folder in level:
            try:
                # Links are not followed: a circle of them would never end, and they lead out of what was asked for.
                inner = sorted(e.path for e in os.scandir(folder) if e.is_dir(follow_symlinks=False))
            except OSError:
                continue
            for path in map(Path, inner):
                visited += 1
                if path.name.startswith(".") or path.name in INSIDE or visited > MOST_FOLDERS:
                    continue
                if is_run(path):
                    runs.append(path)
                else:
                    below.append(path)
        level = below
    return runs


def is_run(folder: Path) -> bool:
    """Whether a folder belongs to a run; one that has just begun has no metrics yet."""
    return (folder / "metrics.jsonl").is_file() or ((folder / "job.json").is_file() and (folder / "logs").is_dir())


def check_roots(roots: Sequence[Path]) -> list[Path]:
    """Returns the folders to search; raises UserError if one does not exist."""
    for root in roots:
        if not root.expanduser().is_dir():
            remedy = "name a run's output folder, or one that holds several"
            raise UserError("FOLDER", str(root), "is no folder", remedy)
    return list(roots)


def _name(root: Path, folder: Path, several: bool) -> str:
    """Display name of a run: its path below the root folder."""
    if folder == root:
        return folder.name
    inner = folder.relative_to(root).as_posix()
    return f"{root.name}/{inner}" if several else inner
