"""Tracks the best evaluation, and stops the run when evaluations no longer improve.

All ranks see the same figures, so they come to the same decision. The state is part of the run's
position, hence of its checkpoints: a resumed run continues to count.
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
    if rest and name not in record:
        return float(record[head][rest])
    return float(record[name])


def better(value: float, best: float | None, more: bool, least: float = 0.0) -> bool:
    """Whether a value improves on the best by more than `least`; NaN and infinity never do."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    gain = value - best if more else best - value
    return gain > least


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
        self._best = run.checkpoint.best
        self._stop = run.train.early_stopping
        self._position = position
        self._metrics = [*ALIAS, *ALWAYS, *figures]
        if len(sources) > 1:
            self._metrics += [f"losses.{name}" for name in sources]
        if sources:
            self._check("checkpoint.best", self._best)
            self._check("train.early_stopping.metric", self._stop)
        best_step = position.best_step
        is_saved = best_step is not None and step_folder(root, best_step).is_dir()
        # Start over with another metric or another output folder.
        if position.best_metric != self._best.metric or not is_saved:
            position.best_value = None
            position.best_step = None
        position.best_metric = self._best.metric
        stop_metric = self._stop.metric if self._stop else None
        if stop_metric is None or position.waiting_metric != stop_metric:
            position.waiting_value = None
            position.waiting = 0
        position.waiting_metric = stop_metric

    def _check(self, field: str, metric: Metric | None) -> None:
        if metric is not None and metric.metric not in self._metrics:
            problem = "the evaluations of this run have no such figure"
            remedy = f"use one of {', '.join(self._metrics)}"
            raise UserError(field, metric.metric, problem, remedy)

    def evaluated(self, record: Mapping[str, Any]) -> bool:
        """Records a new evaluation of the position; returns whether it is the best so far."""
        position = self._position
        best = self._best
        stop = self._stop
        value = figure_of(record, best.metric)
        is_best = better(value, position.best_value, best.more_is_better)
        if is_best:
            position.best_value = value
            position.best_step = position.step
        if stop is not None:
            value = figure_of(record, stop.metric)
            if better(value, position.waiting_value, stop.more_is_better, stop.min_delta):
                position.waiting_value = value
                position.waiting = 0
            else:
                position.waiting += 1
        return is_best

    @property
    def enough(self) -> str:
        """Why the run should end now; empty as long as it should continue."""
        stop = self._stop
        value = self._position.waiting_value
        count = self._position.waiting
        if stop is None or count < stop.patience:
            return ""
        best = "no number yet" if value is None else f"best {value:.6g}"
        return f"stopped early: {stop.metric} has not improved for {count} evaluations ({best})"
