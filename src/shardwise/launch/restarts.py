"""Starting a run again after a rank was lost: how often, from where, and when not.

What is lost to a signal, a broken connection or a stall may go well the next time. A mistake of the user, a device that
is too small and numbers gone wrong would only happen again. A damaged checkpoint is put aside, so that the run goes on
from the one before.
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
    """A rank was lost, or the link to it: what another start may mend."""


class Wrong(Lost):
    """Numbers went wrong and the run is to go back: guard.max_recoveries counts these, not restarts."""


class Restarts:
    """Counts the starts since the last checkpoint that was won."""

    def __init__(self, job: ResolvedRun) -> None:
        self._job, self._most, self._spent = job, job.run.restarts, 0
        self._root = job.output / "checkpoints"
        self._before = self._newest()
        self._known = (self._before, newest_copy(job.output))

    def after(self, failure: Lost) -> tuple[ResolvedRun, str]:
        """The job to start next and what to tell of it; raises the failure where there is to be no other start."""
        damaged = aside(self._root)
        newest, copy = self._newest(), newest_copy(self._job.output)
        if (newest, copy) != self._known:
            self._known, self._spent = (newest, copy), 0
        counted = not isinstance(failure, Wrong)
        if counted and self._spent >= self._most:
            if self._most:
                raise Lost(f"{failure}\n  (started again {_times(self._most)} since the last checkpoint)") from failure
            raise failure
        self._spent += counted
        job, place = self._job, "the beginning"
        if copy > newest_step(self._root) and counted:
            job = replace(job, run=job.run.model_copy(update={"resume": "auto"}))
            place = f"the copy of step {copy} in memory"
        elif newest is not None and newest != self._before:  # of this run, so that nothing else is resumed
            job = replace(job, run=job.run.model_copy(update={"resume": "auto"}))
            place = newest[0]
        elif job.run.resume != "never" and newest is not None:
            place = newest[0] if job.run.resume == "auto" else job.run.resume
        told = "".join(f"\n  {name} is damaged and was put aside" for name in damaged)
        seen = "\n".join(line for line in str(failure).splitlines() if not line.startswith("  →"))
        number = f" ({self._spent} of {self._most})" if counted else ""
        return job, f"{seen}{told}\n  starting again from {place}{number}"

    def _newest(self) -> tuple[str, int] | None:
        found = list_checkpoints(self._root)
        return (found[-1].name, found[-1].stat().st_mtime_ns) if found else None


def aside(root: Path) -> list[str]:
    """Renames the newest checkpoints that are not whole; returns their names."""
    names = []
    for folder in reversed(list_checkpoints(root)):
        if not verify(folder):
            break
        put_aside(folder)
        names.append(folder.name)
    return names


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
