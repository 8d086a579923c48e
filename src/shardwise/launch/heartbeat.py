"""Notices ranks of this host that hang so that no thread of theirs can speak: in a driver call, for example.

A rank's watchdog touches the file of its status every second. Where it cannot, because native code holds Python's lock
or a query of the device never returns, nothing but another process can tell.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from shardwise.core.process import process_state
from shardwise.train.status import STACKS, read_status

GRACE = 20.0  # seconds beyond the timeout: a watchdog that can speak does so first
LONGEST = 1.0  # seconds between two looks that count: this process may have been stopped, too
DUMPING = 2.0  # seconds for the ranks to write their stacks
UNWATCHED = ("starting", "meeting the other ranks")  # no watchdog runs yet
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


class Heartbeats:
    """The ranks of this host (`processes` by rank), and how long each has been silent."""

    def __init__(self, logs: Path, processes: Mapping[int, int], timeout: float) -> None:
        self._logs = logs
        self._processes = processes
        self._timeout = timeout
        self._beats = dict.fromkeys(processes, 0.0)
        self._seconds = dict.fromkeys(processes, 0.0)
        self._looked = time.monotonic()

    def verdict(self) -> str:
        """The report on ranks that hang, "" while there are none."""
        now = time.monotonic()
        passed = min(now - self._looked, LONGEST)
        self._looked = now
        for rank in self._processes:
            file = self._status(rank)
            with contextlib.suppress(OSError):
                beat = file.stat().st_mtime
                silent = beat == self._beats[rank] and read_status(file)[1] not in UNWATCHED
                self._seconds[rank] = self._seconds[rank] + passed if silent else 0.0
                self._beats[rank] = beat
        if max(self._seconds.values(), default=0.0) <= self._timeout + GRACE:
            return ""
        # Those that fell silent a little later hang for the same reason.
        return self._report([rank for rank, seconds in self._seconds.items() if seconds > self._timeout])

    def _report(self, hung: list[int]) -> str:
        from shardwise.train.watchdog.verdict import Silent, judge_hung

        states = []
        for rank in hung:
            step, doing = read_status(self._status(rank))
            process = self._processes[rank]
            states.append(Silent(rank, socket.gethostname(), process, step, doing, process_state(process)))
        stacks = self._stacks()
        text = judge_hung(states, [_innermost(stacks.get(rank, "")) for rank in hung], self._timeout)
        if not stacks:
            return text
        file = self._logs / STACKS
        with contextlib.suppress(OSError):
            file.write_text("\n\n".join(f"rank {rank}\n{stack}" for rank, stack in sorted(stacks.items())))
            text += f"\n  stacks of all ranks that answered: {file}"
        return text

    def _stacks(self) -> dict[int, str]:
        """The Python stacks of the ranks, which their signal handlers write without Python's lock."""
        for rank, process in self._processes.items():
            if stack_file(self._logs, rank).exists():  # else its process does not handle the signal
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGUSR2)
        time.sleep(DUMPING)
        stacks = {}
        for rank in self._processes:
            with contextlib.suppress(OSError):
                stacks[rank] = stack_file(self._logs, rank).read_text()
        return {rank: stack for rank, stack in stacks.items() if stack}

    def _status(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.status"


def stack_file(logs: Path, rank: int) -> Path:
    """Where a rank writes its stacks when it gets SIGUSR2."""
    return logs / f"rank-{rank}.stack"


def _innermost(stack: str) -> str:
    """The innermost line of the thread that trains, outside torch where it has one there."""
    frames = [match for match in FRAME.finditer(stack.rpartition("Current thread")[2] or stack)]
    if not frames:
        return ""
    own = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame["file"]]
    frame = (own or frames)[0]
    return f"{frame['function']} ({os.sep.join(frame['file'].split(os.sep)[-2:])}:{frame['line']})"
