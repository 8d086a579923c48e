"""Metrics of a run as columns of numbers, downsampled to what a screen can show.

Downsampling keeps the minimum and maximum of each interval, where the spikes are: a mean would hide the very step that
one looks for. Zooming in requests a narrower range, and so gets the detail.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NESTED = ("losses", "breakdown", "experts")  # mappings of numbers within a record
LEFT_OUT = frozenset(  # of no use as curves
    {"step", "time", "sequences", "tokens", "supervised_tokens", "eta_seconds", "epoch"}
)
MOST_NAMES = 200  # of one kind: nobody can tell the lines of thousands of sources apart

Points = tuple[list[float], list[float | None]]


@dataclass
class Column:
    """One metric: positions and values."""

    at: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def part(
        self, points: int, after: float = -math.inf, first: float = -math.inf, last: float = math.inf
    ) -> Points | None:
        """At most about `points` points after `after` and from `first` to `last`; None if there are none."""
        at, values = np.array(self.at), np.array(self.values)
        begin = max(int(np.searchsorted(at, after, side="right")), int(np.searchsorted(at, first, side="left")))
        end = int(np.searchsorted(at, last, side="right"))
        if begin >= end:
            return None
        at = at[begin:end]
        values = values[begin:end]
        indices = thin(values, points)
        return at[indices].tolist(), [round_off(value) for value in values[indices].tolist()]

    def cut(self, at: float) -> None:
        """Drops the points from a position on."""
        keep = int(np.searchsorted(np.array(self.at), at, side="left"))
        del self.at[keep:], self.values[keep:]


def thin(values: np.ndarray[Any, np.dtype[np.float64]], points: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Indices to keep: all if they are few, else the first, the last and each interval's extremes."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    size = math.ceil(2 * count / max(2, points))
    stretches = math.ceil(count / size)
    padded = np.full(stretches * size, np.nan)
    padded[:count] = values
    rows = padded.reshape(stretches, size)
    low = np.where(np.isnan(rows), np.inf, rows).argmin(axis=1)
    high = np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1)
    starts = np.arange(stretches) * size
    return np.unique(np.concatenate([starts + low, starts + high, [0, count - 1]]))


def round_off(value: float) -> float | None:
    """Rounds to six digits, more than a screen shows; None for NaN and infinities."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class Columns:
    """All metrics of one file by kind and name; `generation` changes when points already served become invalid."""

    def __init__(self, generation: int = 0) -> None:
        self.kinds: dict[str, dict[str, Column]] = {}
        self.latest: dict[str, dict[str, Any]] = {}
        self.generation = generation
        self._ends: dict[str, float] = {}

    def clear(self) -> None:
        """Removes all points."""
        self.kinds = {}
        self.latest = {}
        self._ends = {}
        self.generation += 1

    def add(self, record: dict[str, Any], axis: str = "step") -> None:
        """Adds one record; a repeated step invalidates what came after it."""
        kind, at = record.get("kind"), record.get(axis)
        if not isinstance(kind, str) or not isinstance(at, int | float) or not _is_number(at):
            return
        columns = self.kinds.setdefault(kind, {})
        if at <= self._ends.get(kind, -math.inf):
            for column in columns.values():
                column.cut(at)
            self.generation += 1
        self._ends[kind], self.latest[kind] = at, record
        for name, value in record.items():
            exact = type(value)
            if exact is float or exact is int:
                if name not in LEFT_OUT:
                    _put(columns, name, at, value)
            elif name in NESTED and exact is dict:
                for inner, number in value.items():
                    if _is_number(number):
                        _put(columns, f"{name}/{inner}", at, number)
        for name in record.get("nonfinite") or ():
            if record.get(name, 0) is None and name not in LEFT_OUT:
                _put(columns, name, at, math.nan)

    def end(self, kind: str) -> float | None:
        """Position of the last record of a kind."""
        return self._ends.get(kind)


def _put(columns: dict[str, Column], name: str, at: float, value: float) -> None:
    column = columns.get(name)
    if column is None:
        if len(columns) >= MOST_NAMES:
            return
        column = columns[name] = Column()
    column.at.append(at)
    column.values.append(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
