"""Ranks of a trial: forked from this process, waited for, and what each came to."""

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

from shardwise.nn.tiny.case import CannotParallelize, Deviation


def run_ranks(
    work: Callable[[int, Path], Any], ranks: int, limit: float
) -> list[dict[str, Any] | None]:
    """What forked ranks answer, None for those that do not within the limit."""
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        _wait([_fork(rank, work, Path(folder)) for rank in range(ranks)], deadline)
        return [_read(Path(folder) / f"{rank}.json") for rank in range(ranks)]


def outcome_of(trial: Callable[[], Deviation]) -> dict[str, Any]:
    """What a trial came to: `pass`, `wrong` with what is off, or `refused` with the reason."""
    try:
        verdict = trial()
    except CannotParallelize as refusal:
        return {"outcome": "refused", "why": str(refusal)}
    except BaseException as error:
        traceback.print_exc()
        return {"outcome": "refused", "why": _line(error)}
    found = {"loss": verdict.loss, "gradient": verdict.gradient}
    if verdict.right:
        return found | {"outcome": "pass"}
    return found | {
        "outcome": "wrong",
        "why": f"the gradient of {verdict.module}" if verdict.module else "the loss",
    }


def _line(error: BaseException) -> str:
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
