"""Which evaluation was the best, and whether enough of them have brought nothing.

All ranks see the same figures, so they come to the same decision. What is known lies in the run's position, hence in
its checkpoints: a run that is resumed counts on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpoint.folders import step_folder
from shardwise.config.metrics import Metric
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.train.state import Position

ALIAS = {"eval_loss": "loss"}
ALWAYS = ("loss",)


def figure_of(record: Mapping[str, Any], metric: str) -> float:
    """A figure of an evaluation's record by its name; a source's name may have dots."""
    name = ALIAS.get(metric, metric)
    head, _, rest = name.partition(".")
    value = record[head][rest] if rest and name not in record else record[name]
    return float(value)


def better(value: float, best: float | None, more: bool, least: float = 0.0) -> bool:
    """Whether a value improves on the best so far by more than `least`; what is no number never does."""
    if not math.isfinite(value):
        return False
    return best is None or (value - best if more else best - value) > least


class EarlyStopping:
    """Follows evaluations: `checkpoint.best` and `train.early_stopping`."""

    def __init__(
        self,
        run: Run,
        position: Position,
        root: Path,
        sources: Sequence[str],
        figures: Sequence[str],
    ) -> None:
        self._best, self._stop, self._position = (
            run.checkpoint.best,
            run.train.early_stopping,
            position,
        )
        self._known = [
            *ALIAS,
            *ALWAYS,
            *figures,
            *(f"losses.{name}" for name in sources if len(sources) > 1),
        ]
        if sources:
            for field, metric in (
                ("checkpoint.best", self._best),
                ("train.early_stopping.metric", self._stop),
            ):
                self._check(field, metric)
        there = position.best_step is not None and step_folder(root, position.best_step).is_dir()
        if (
            position.best_metric != self._best.metric or not there
        ):  # another figure, or another output folder
            position.best_value, position.best_step = None, None
        position.best_metric = self._best.metric
        if self._stop is None or position.waiting_metric != self._stop.metric:
            position.waiting_value, position.waiting = None, 0
        position.waiting_metric = self._stop.metric if self._stop else None

    def _check(self, field: str, metric: Metric | None) -> None:
        if metric is not None and metric.metric not in self._known:
            problem = "the evaluations of this run have no such figure"
            raise UserError(field, metric.metric, problem, f"use one of {', '.join(self._known)}")

    def evaluated(self, record: Mapping[str, Any]) -> bool:
        """Takes a new evaluation of the position; whether it is the best so far."""
        position, best, stop = self._position, self._best, self._stop
        value = figure_of(record, best.metric)
        is_best = better(value, position.best_value, best.more_is_better)
        if is_best:
            position.best_value, position.best_step = value, position.step
        if stop is not None:
            value = figure_of(record, stop.metric)
            if better(value, position.waiting_value, stop.more_is_better, stop.min_delta):
                position.waiting_value, position.waiting = value, 0
            else:
                position.waiting += 1
        return is_best

    @property
    def enough(self) -> str:
        """Why the run should end here; empty as long as it should go on."""
        stop, position = self._stop, self._position
        if stop is None or position.waiting < stop.patience:
            return ""
        best = (
            "no number yet"
            if position.waiting_value is None
            else f"best {position.waiting_value:.6g}"
        )
        return f"stopped early: {stop.metric} has not improved for {position.waiting} evaluations ({best})"
