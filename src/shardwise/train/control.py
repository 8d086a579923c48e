"""Decisions that all ranks must take at the same step: stop on a signal, timed saves and copies.

Each step begins an asynchronous vote on the host's own group and reads it at the end of the step.
No rank waits: the vote travels while the device computes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

STOP, SAVE, EVAL, COPY, PACE, BUSY = range(6)


class Control:
    """Votes of the ranks on whether to stop and whether a timed save or evaluation is due."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        save_seconds: float | None,
        eval_seconds: float | None,
        copy_seconds: float | None = None,
        pace_seconds: float | None = None,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`busy`: whether this rank still copies to memory; no rank then begins another copy."""
        self._group = group
        self._alone = dist.get_world_size(group) == 1
        self._is_main = dist.get_rank(group) == 0
        self._every = {
            SAVE: save_seconds,
            EVAL: eval_seconds,
            COPY: copy_seconds,
            PACE: pace_seconds,
        }
        self._since = dict.fromkeys(self._every, time.monotonic())
        self._previous: dict[int, object] = {}
        self._vote = torch.zeros(6, dtype=torch.int32)
        self._work: dist.Work | None = None
        self.signal: int | None = None
        self._busy = busy
        # Results of the last vote.
        self.busy = False
        self.copy_due = False
        self.pace_due = False

    def __enter__(self) -> Control:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread (a library user's choice): signals stay theirs
                return self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def begin(self) -> None:
        """Casts this rank's vote."""
        self._vote[STOP] = self.signal or 0
        now = time.monotonic()
        for what, seconds in self._every.items():
            due = self._is_main and seconds is not None and now - self._since[what] >= seconds
            self._vote[what] = int(due)
        self._vote[BUSY] = int(self._busy())
        if not self._alone:
            self._work = dist.all_reduce(
                self._vote, dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def end(self) -> tuple[int, bool, bool]:
        """The outcome: the signal to stop on (0: none), whether to save, whether to evaluate."""
        if self._work is not None:
            self._work.wait()
        vote = self._vote.tolist()
        self.busy = bool(vote[BUSY])
        self.copy_due = bool(vote[COPY]) and not self.busy
        self.pace_due = bool(vote[PACE])
        due = {SAVE: vote[SAVE], EVAL: vote[EVAL], COPY: self.copy_due, PACE: self.pace_due}
        for what, is_due in due.items():
            if is_due:
                self._since[what] = time.monotonic()
        return vote[STOP], bool(vote[SAVE]), bool(vote[EVAL])
