"""Figures with their uncertainty, and differences between models on the same items.

Every figure is a ratio of sums: of correct answers to questions, of losses to tokens. The standard error is that of a
ratio of sums over items drawn at random (a question, a packed batch); where two models saw the same items, that of
their difference is computed item by item, which is far smaller than the two errors together would say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Figure:
    """One figure of a model; `sums` and `units` per item where they are known."""

    name: str
    value: float
    error: float | None = None
    count: int = 0
    more_is_better: bool = True
    sums: np.ndarray | None = None
    units: np.ndarray | None = None

    def to_json(self) -> dict[str, Any]:
        """For results.json; no value where there was nothing to measure (JSON knows no NaN)."""
        value = None if math.isnan(self.value) else self.value
        return {"value": value, "stderr": self.error, "count": self.count, "more_is_better": self.more_is_better}


@dataclass
class TaskResult:
    """What a model has to show on one task; `groups` are its main figure by subject or source."""

    task: str
    kind: str
    figures: list[Figure]
    groups: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "task": self.task,
            "kind": self.kind,
            "figures": {f.name: f.to_json() for f in self.figures},
            "groups": {name: f.to_json() for name, f in self.groups.items()},
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
        }


def ratio(
    name: str, sums: Sequence[float] | np.ndarray, units: Sequence[float] | np.ndarray | None = None, more: bool = True
) -> Figure:
    """Sum of `sums` over sum of `units` (1 each unless given), with its standard error."""
    sums = np.asarray(sums, dtype=np.float64)
    units = np.ones_like(sums) if units is None else np.asarray(units, dtype=np.float64)
    value = float(sums.sum() / units.sum()) if units.any() else math.nan
    return Figure(name, value, _error(sums - value * units, units), int(np.count_nonzero(units)), more, sums, units)


def by_group(name: str, sums: Sequence[float], groups: Sequence[str | None]) -> dict[str, Figure]:
    """A figure for each group, in the order of their names; nothing where no item has one."""
    names = sorted({g for g in groups if g is not None})
    return {g: ratio(name, [s for s, of in zip(sums, groups, strict=True) if of == g]) for g in names}


@dataclass(frozen=True)
class FigureDifference:
    """How a figure differs from the first model's; `paired`: item by item."""

    value: float
    error: float | None
    paired: bool

    @property
    def clear(self) -> bool:
        """Whether it is more than twice its standard error."""
        return self.error is not None and abs(self.value) > 2 * self.error


def difference(one: Figure, first: Figure) -> FigureDifference | None:
    """Of two models' figures; None where they are means over different things."""
    value = one.value - first.value
    if math.isnan(value):
        return None
    if one.sums is None or first.sums is None or one.units is None or first.units is None:
        known = one.error is not None and first.error is not None
        return FigureDifference(value, math.hypot(one.error or 0, first.error or 0) if known else None, False)
    if not np.array_equal(one.units, first.units):
        return None
    rest = (one.sums - one.value * one.units) - (first.sums - first.value * first.units)
    return FigureDifference(value, _error(rest, one.units), True)


def _error(rest: np.ndarray, units: np.ndarray) -> float | None:
    """None for a single item; one without units (a grade that could not be read) is none."""
    count = int(np.count_nonzero(units))
    return float(math.sqrt(count / (count - 1) * np.square(rest).sum()) / units.sum()) if count > 1 else None
