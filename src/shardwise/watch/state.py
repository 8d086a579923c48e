"""State of a run: running, finished, failed, stopped or silent; derived from its files, as it may be on another host.

The run may have been killed, or run where we cannot see its processes. So its own records count first (a result, a
failure note), then its processes if they are on this host, then how long ago it last wrote.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.watch.tail import Record, read_json

QUIET = 120.0  # seconds without a word before a run counts as silent; more where its steps are long
PATIENCE = 20.0  # steps' worth of time that it may say nothing


@dataclass(frozen=True)
class State:
    """State in a word, since when, and why."""

    word: str  # starting | running | finished | failed | stopped | silent
    since: float | None = None
    why: str = ""

    def json(self) -> dict[str, Any]:
        """JSON form for the page."""
        return {"word": self.word, "since": self.since, "why": self.why}


def state_of(folder: Path, starts: list[Record], step_seconds: float | None, now: float | None = None) -> State:
    """Derives the state from a run's files; `starts` are the first records of its ranks."""
    now = time.time() if now is None else now
    logs = folder / "logs"
    began = max((float(s.get("time") or 0) for s in starts), default=0.0) or _modified_at(folder / "job.json") or 0.0
    failure = read_json(logs / "failure.json")  # the supervisor's, which knows more than a rank
    if failure and float(failure.get("time") or 0) >= began:
        return State("failed", failure.get("time"), str(failure.get("reason")))
    if notes := [note for file in sorted(logs.glob("rank-*.error.json")) if (note := read_json(file))]:
        note = min(notes, key=lambda entry: float(entry.get("time") or 0))
        if float(note.get("time") or 0) >= began:  # under torchrun an earlier start's notes stay
            who = f"rank {note.get('rank')} at step {note.get('step')} while {note.get('doing')}"
            words = f"{who}: {note.get('reason')}"
            return State("failed", note.get("time"), words)
    ended = _modified_at(folder / "result.json")
    if ended is not None and ended >= began:
        return State("finished", ended, str(read_json(folder / "result.json").get("ended") or ""))
    last_write = max(filter(None, map(_modified_at, _written_files(folder))), default=None)
    local = [s for s in starts if s.get("host") == socket.gethostname()]
    if local and len(local) == len(starts) and not any(map(_is_alive, local)):
        return State(
            "stopped", last_write, "its processes have ended; the same command goes on from its last checkpoint"
        )
    if last_write is None or now - last_write > max(QUIET, PATIENCE * (step_seconds or 0.0)):
        return State("silent", last_write, "nothing was written since")
    return State("running" if starts else "starting", began or None)


def _written_files(folder: Path) -> list[Path]:
    logs = folder / "logs"
    return [folder / "metrics.jsonl", folder / "job.json", *logs.glob("rank-*.status"), *logs.glob("rank-*.jsonl")]


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _is_alive(start: Record) -> bool:
    """Whether that very process exists: process ids are reused."""
    import psutil

    try:
        return abs(psutil.Process(int(start["pid"])).create_time() - float(start["began"])) < 2
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False
