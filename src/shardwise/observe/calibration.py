"""Predictions beside what came true, kept over runs: what was off before is corrected the next time."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.core.cache import cache_root

LAST = 50  # records that count
ENOUGH = 3
MEMORY, TIME = (0.95, 1.15), (0.5, 2.0)  # bounds of a correction: beyond them something else is wrong


@dataclass(frozen=True)
class Record:
    """One run."""

    device: str
    model: str
    predicted_bytes: float
    measured_bytes: float
    predicted_seconds: float
    measured_seconds: float
    when: float = 0.0


@dataclass(frozen=True)
class Correction:
    """Factors for the next prediction, and how many runs they come from."""

    memory: float = 1.0
    time: float = 1.0
    runs: int = 0


def add(record: Record) -> None:
    """Keeps a record; a disk that is full or read-only is no reason to fail a finished run."""
    from filelock import FileLock

    file = _file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=10), file.open("a") as lines:
            lines.write(json.dumps(asdict(record) | {"when": time.time()}) + "\n")


def records(device: str | None = None) -> list[Record]:
    """The newest of a device, or of all."""
    try:
        lines = _file().read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError, TypeError):
            found.append(Record(**json.loads(line)))
    return [one for one in found if device in (None, one.device)][-LAST:]


def correction(device: str) -> Correction:
    """The medians of what was off on this kind of device; none until there are a few runs."""
    known = [one for one in records(device) if one.predicted_bytes > 0 and one.predicted_seconds > 0]
    if len(known) < ENOUGH:
        return Correction()
    size = statistics.median(one.measured_bytes / one.predicted_bytes for one in known)
    spent = statistics.median(one.measured_seconds / one.predicted_seconds for one in known)
    return Correction(_within(size, MEMORY), _within(spent, TIME), len(known))


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _file() -> Path:
    return cache_root() / "foresight.jsonl"
