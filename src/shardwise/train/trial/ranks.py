"""Forks the ranks of a trial from this process, waits for them, and collects their outcomes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.core.lost_peer import is_echo
from shardwise.nn.tiny.case import CannotParallelize, Deviation


def run_ranks(
    work: Callable[[int, Path], Any], ranks: int, limit: float
) -> list[dict[str, Any] | None]:
    """Returns what each forked rank answers, None for one that does not within the limit."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        _wait([_fork(rank, work, Path(folder)) for rank in range(ranks)], deadline)
        return [_read(Path(folder) / f"{rank}.json") for rank in range(ranks)]


def failure_of(answers: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The failed rank's own outcome, not that of ranks that lost it; None if all passed."""
    failures = [answer for answer in answers if answer and answer["outcome"] != "pass"]
    for failure in failures:
        if failure["outcome"] == "wrong" or not is_echo(failure["why"]):
            return failure
    if failures or None in answers:
        return {"outcome": "silent", "why": "a rank crashed or gave no answer in time"}
    return None


def outcome_of(trial: Callable[[], Deviation]) -> dict[str, Any]:
    """Returns `pass`, `wrong` with what is off, or `refused` with the reason."""
    try:
        deviation = trial()
    except CannotParallelize as refusal:
        return {"outcome": "refused", "why": str(refusal)}
    except BaseException as error:
        traceback.print_exc()
        return {"outcome": "refused", "why": line_of(error)}
    outcome: dict[str, Any] = {"loss": deviation.loss, "gradient": deviation.gradient}
    if deviation.right:
        return outcome | {"outcome": "pass"}
    why = f"the gradient of {deviation.module}" if deviation.module else "the loss"
    return outcome | {"outcome": "wrong", "why": why}


def line_of(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message, in 200 characters."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def _wait(children: list[int], deadline: float) -> None:
    waiting = list(children)
    while waiting and time.monotonic() < deadline:
        waiting = [pid for pid in waiting if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        time.sleep(0.02)
    for pid in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def _fork(rank: int, work: Callable[[int, Path], Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        if "SHARDWISE_ZOO_TRACE" not in os.environ:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
        answer = work(rank, folder)
        (folder / f"{rank}.part").write_text(json.dumps(answer))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    finally:
        os._exit(0)
