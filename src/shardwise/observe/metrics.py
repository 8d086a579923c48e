"""The durable record of a run: JSON lines, readable by any tool while the run is in progress.

A process can die in the middle of a line. Every reader and writer here tolerates such a torn last line, and only
that: damage anywhere else is reported, because dropping records silently would falsify the curve.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.core.errors import UserError
from shardwise.observe.tables import Tables

Record = dict[str, Any]


class MetricsFile:
    """Appends records to a metrics file that other processes may follow; one writer at a time."""

    def __init__(self, path: Path, tables: Tables | None = None) -> None:
        self.path, self._tables = path, tables
        path.parent.mkdir(parents=True, exist_ok=True)
        _terminate_last_line(path)
        self._file = path.open("ab")

    def append(self, record: Record) -> None:
        """Writes one record and flushes it; non-finite numbers become null and are named under `nonfinite`."""
        nonfinite: list[str] = []
        clean = {key: _finite(value, key, nonfinite) for key, value in record.items()}
        if nonfinite:
            clean["nonfinite"] = nonfinite
        line = json.dumps(clean, ensure_ascii=False, allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        if self._tables is not None:
            self._tables.append(clean)

    def truncate_after(self, step: int) -> None:
        """Drops the records of later steps, so that a resumed run does not report steps twice."""
        self._file.close()
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as out:
                for record, line in _parse(self.path):
                    at = record.get("step")
                    if at is None or at <= step:
                        out.write(line + b"\n")
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
            self._file = self.path.open("ab")
        if self._tables is not None:
            self._tables.rewrite(read_metrics(self.path))

    def close(self) -> None:
        """Closes the file; closing twice is harmless."""
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """Returns every complete record of a metrics file, in the order written."""
    return [record for record, _ in _parse(path)]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a nested mapping by dotted path."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _finite(value: Any, name: str, nonfinite: list[str]) -> Any:
    """Replaces NaN and infinities, which JSON does not have, by null and records their names."""
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(name)
        return None
    if isinstance(value, dict):
        return {key: _finite(inner, f"{name}.{key}", nonfinite) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner, f"{name}.{index}", nonfinite) for index, inner in enumerate(value)]
    return value


def _decode(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:  # broken JSON, or bytes cut inside a character
        return None
    return record if isinstance(record, dict) else None


def _parse(path: Path) -> list[tuple[Record, bytes]]:
    parsed: list[tuple[Record, bytes]] = []
    *lines, tail = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _decode(line)
        if record is None:
            raise UserError(f"{path}:{number}", None, "not a JSON object", "delete or repair this line")
        parsed.append((record, line))
    # Without its newline the last line is either whole or torn; only a whole one counts.
    last = _decode(tail)
    if last is not None:
        parsed.append((last, tail))
    return parsed


def _terminate_last_line(path: Path) -> None:
    """Terminates a line cut by a crash, so that the next record starts on its own line."""
    if not path.exists():
        return
    content = path.read_bytes()
    tail = content.rsplit(b"\n", 1)[-1]
    if not tail:
        return
    if _decode(tail) is None:
        os.truncate(path, len(content) - len(tail))
    else:
        with path.open("ab") as file:
            file.write(b"\n")
