"""The ranks of a run side by side: step, activity, time, and which one delays the others.

All ranks end a step together, so seconds per step do not show which one is slow. What does, if the run records it
(`log.breakdown`), is the time that a rank does *not* wait for the others: the slow one waits least. Otherwise a rank is
marked when it is behind, or has been silent for longer than the others.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.observe.ranks import rank_file
from shardwise.train.status import read_status
from shardwise.watch.tail import Record, first_record, last_records

SLOWER = 1.25  # busy times the others' median
LEAST = 0.005  # seconds: below that it is noise
RECENT = 20  # reports that a rank's figures are the mean of
_NAME = re.compile(r"rank-(\d{1,6})\.(?:log|status|metrics\.jsonl)")


def rank_numbers(logs: Path) -> list[int]:
    """The ranks that have written a file."""
    try:
        names = [file.name for file in logs.iterdir()]
    except OSError:
        return []
    return sorted({int(match[1]) for name in names if (match := _NAME.fullmatch(name))})


def starts_of(logs: Path, numbers: list[int]) -> list[Record]:
    """The first record of each rank."""
    first = [first_record(rank_file(logs, rank)) for rank in numbers]
    return [record for record in first if record.get("kind") == "start"]


def rank_rows(logs: Path, numbers: list[int], now: float | None = None) -> list[dict[str, Any]]:
    """One row per rank, with anomalies marked."""
    now = time.time() if now is None else now
    rows = [_row(logs, rank, now) for rank in numbers]
    _mark(rows)
    return rows


def _row(logs: Path, rank: int, now: float) -> dict[str, Any]:
    status = logs / f"rank-{rank}.status"
    silent = None
    step, doing = read_status(status)
    entries = last_records(rank_file(logs, rank))
    if entries and entries[-1].get("kind") == "end":  # its status is of before
        doing = "ended" if entries[-1].get("outcome") == "left" else "failed"
    records = [r for r in entries if r.get("kind") == "rank"][-RECENT:]
    last = records[-1] if records else {}
    with contextlib.suppress(OSError):
        silent = now - status.stat().st_mtime
    return {
        "rank": rank, "step": step or last.get("step"), "doing": doing, "silent": silent,
        "seconds": _mean(records, "seconds"), "waiting": _mean(records, "waiting"),
        "cpu_seconds": _mean(records, "cpu_seconds"), "memory": last.get("memory_bytes"), "rss": last.get("rss_bytes"),
        "log": _size(logs / f"rank-{rank}.log"), "amiss": "",
    }  # fmt: skip


def _size(file: Path) -> int:
    """Size of a log in bytes; the page fetches the log again only when it changes."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _mark(rows: list[dict[str, Any]]) -> None:
    if len(rows) < 2:
        return
    busy = {r["rank"]: r["seconds"] - r["waiting"] for r in rows if r["seconds"] and r["waiting"] is not None}
    usual = median(busy.values()) if len(busy) == len(rows) else math.inf
    furthest = max(int(row["step"] or 0) for row in rows)
    quiet = median(row["silent"] for row in rows if row["silent"] is not None) if any(
        row["silent"] is not None for row in rows
    ) else 0.0  # fmt: skip
    for row in rows:
        own = busy.get(row["rank"], 0.0)
        if furthest - int(row["step"] or 0) > 1:
            row["amiss"] = f"{furthest - int(row['step'] or 0)} steps behind"
        elif own > SLOWER * usual and own - usual > LEAST:
            row["amiss"] = f"slow: busy {own / usual:.1f} times as long as the others"
        elif (row["silent"] or 0.0) > max(30.0, 3 * quiet):
            row["amiss"] = f"silent for {row['silent']:.0f} s"


def _mean(records: list[Record], key: str) -> float | None:
    values = [float(r[key]) for r in records if isinstance(r.get(key), int | float)]
    return sum(values) / len(values) if values else None
