"""Figures with their standard error, and differences between models on the same items.

Every figure is a ratio of sums: of correct answers to questions, of losses to tokens. The standard error is that of a
ratio of sums over items drawn at random (a question, a packed batch); where two models saw the same items, that of
their difference is computed item by item, which is far smaller than the two errors together would suggest.
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
        """Returns the entry of results.json; no value where there was nothing to measure (JSON has no NaN)."""
        value = None if math.isnan(self.value) else self.value
        return {"value": value, "stderr": self.error, "count": self.count, "more_is_better": self.more_is_better}


@dataclass
class TaskResult:
    """Results of a model on one task; `groups` are its main figure by subject or source."""

    task: str
    kind: str
    figures: list[Figure]
    groups: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of results.json."""
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
    """Returns the sum of `sums` over the sum of `units` (1 each by default), with its standard error."""
    sums = np.asarray(sums, dtype=np.float64)
    units = np.ones_like(sums) if units is None else np.asarray(units, dtype=np.float64)
    value = float(sums.sum() / units.sum()) if units.any() else math.nan
    return Figure(name, value, _error(sums - value * units, units), int(np.count_nonzero(units)), more, sums, units)


def by_group(name: str, sums: Sequence[float], groups: Sequence[str | None]) -> dict[str, Figure]:
    """Returns a figure for each group, sorted by name; empty if no item has one."""
    members: dict[str, list[float]] = {}
    for value, group in zip(sums, groups, strict=True):
        if group is not None:
            members.setdefault(group, []).append(value)
    return {group: ratio(name, members[group]) for group in sorted(members)}


@dataclass(frozen=True)
class FigureDifference:
    """Difference of a figure from the first model's; `paired`: item by item."""

    value: float
    error: float | None
    paired: bool

    @property
    def clear(self) -> bool:
        """Whether it is more than twice its standard error."""
        return self.error is not None and abs(self.value) > 2 * self.error


def difference(figure: Figure, first: Figure) -> FigureDifference | None:
    """Returns the difference of two models' figures; None if they are means over different items."""
    value = figure.value - first.value
    if math.isnan(value):
        return None
    if figure.sums is None or first.sums is None or figure.units is None or first.units is None:
        both_known = figure.error is not None and first.error is not None
        return FigureDifference(value, math.hypot(figure.error or 0, first.error or 0) if both_known else None, False)
    if not np.array_equal(figure.units, first.units):
        return None
    residuals = (figure.sums - figure.value * figure.units) - (first.sums - first.value * first.units)
    return FigureDifference(value, _error(residuals, figure.units), True)


def _error(residuals: np.ndarray, units: np.ndarray) -> float | None:
    """None for a single item; items without units (a grade that could not be parsed) do not count."""
    count = int(np.count_nonzero(units))
    return float(math.sqrt(count / (count - 1) * np.square(residuals).sum()) / units.sum()) if count > 1 else None
