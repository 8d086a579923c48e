"""Predictions and measurements stored over runs, to correct later predictions."""

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
    """Prediction and measurement of one run."""

    device: str
    model: str
    predicted_bytes: float
    measured_bytes: float
    predicted_seconds: float
    measured_seconds: float
    when: float = 0.0


@dataclass(frozen=True)
class Correction:
    """Correction factors for the next prediction, and the number of runs they are based on."""

    memory: float = 1.0
    time: float = 1.0
    runs: int = 0


def add(record: Record) -> None:
    """Stores a record; a full or read-only disk does not fail a finished run."""
    from filelock import FileLock

    file = _file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=10), file.open("a") as lines:
            lines.write(json.dumps(asdict(record) | {"when": time.time()}) + "\n")


def records(device: str | None = None) -> list[Record]:
    """The newest records of a device, or of all devices."""
    try:
        lines = _file().read_text().splitlines()
    except OSError:
        return []
    parsed = []
    for line in lines:
        with suppress(ValueError, TypeError):
            parsed.append(Record(**json.loads(line)))
    return [record for record in parsed if device in (None, record.device)][-LAST:]


def correction(device: str) -> Correction:
    """Median ratios of measurement to prediction on this kind of device; none until there are a few runs."""
    known = [record for record in records(device) if record.predicted_bytes > 0 and record.predicted_seconds > 0]
    if len(known) < ENOUGH:
        return Correction()
    memory_ratio = statistics.median(record.measured_bytes / record.predicted_bytes for record in known)
    time_ratio = statistics.median(record.measured_seconds / record.predicted_seconds for record in known)
    return Correction(_within(memory_ratio, MEMORY), _within(time_ratio, TIME), len(known))


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _file() -> Path:
    return cache_root() / "foresight.jsonl"
