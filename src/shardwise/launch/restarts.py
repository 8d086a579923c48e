"""Restarts a run after a rank was lost: how often, from where, and when not.

A signal, a broken connection or a stall may not happen again. A user error, a device that is too small and diverged
numbers would. A damaged checkpoint is renamed, so that the run resumes from the one before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardwise.checkpoint.folders import list_checkpoints, newest_step, put_aside
from shardwise.checkpoint.host_copies import newest_copy
from shardwise.checkpoint.integrity import verify
from shardwise.core.errors import RunFailed
from shardwise.resolved_run import ResolvedRun


class Lost(RunFailed):
    """A rank, or the connection to it, was lost: a restart may help."""


class Wrong(Lost):
    """The numbers diverged and the run has to go back: counted by guard.max_recoveries, not by restarts."""


class Restarts:
    """Counts restarts since the last new checkpoint."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self._resolved = resolved
        self._most = resolved.run.restarts
        self._spent = 0
        self._root = resolved.output / "checkpoints"
        self._before = self._newest()
        self._known = (self._before, newest_copy(resolved.output))

    def after(self, failure: Lost) -> tuple[ResolvedRun, str]:
        """The run to start next and a message about it; raises the failure if restarts are exhausted."""
        damaged = aside(self._root)
        newest = self._newest()
        copy = newest_copy(self._resolved.output)
        if (newest, copy) != self._known:
            self._known = (newest, copy)
            self._spent = 0
        counted = not isinstance(failure, Wrong)
        if counted and self._spent >= self._most:
            if self._most:
                raise Lost(f"{failure}\n  (started again {_times(self._most)} since the last checkpoint)") from failure
            raise failure
        self._spent += counted
        resolved = self._resolved
        origin = "the beginning"
        if copy > newest_step(self._root) and counted:
            resolved = replace(resolved, run=resolved.run.model_copy(update={"resume": "auto"}))
            origin = f"the copy of step {copy} in memory"
        elif newest is not None and newest != self._before:  # of this run, so that nothing else is resumed
            resolved = replace(resolved, run=resolved.run.model_copy(update={"resume": "auto"}))
            origin = newest[0]
        elif resolved.run.resume != "never" and newest is not None:
            origin = newest[0] if resolved.run.resume == "auto" else resolved.run.resume
        notes = "".join(f"\n  {name} is damaged and was put aside" for name in damaged)
        summary = "\n".join(line for line in str(failure).splitlines() if not line.startswith("  →"))
        number = f" ({self._spent} of {self._most})" if counted else ""
        return resolved, f"{summary}{notes}\n  starting again from {origin}{number}"

    def _newest(self) -> tuple[str, int] | None:
        checkpoints = list_checkpoints(self._root)
        return (checkpoints[-1].name, checkpoints[-1].stat().st_mtime_ns) if checkpoints else None


def aside(root: Path) -> list[str]:
    """Renames the newest incomplete checkpoints; returns their names."""
    names = []
    for folder in reversed(list_checkpoints(root)):
        if not verify(folder):
            break
        put_aside(folder)
        names.append(folder.name)
    return names


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
