"""Forwards the metrics of metrics.jsonl to trackers (TensorBoard, W&B, Trackio, MLflow).

Each has its own thread and queue: a slow one does not delay training, and a failing one is reported once and dropped,
as the metrics are in metrics.jsonl in any case. Trackers read their API keys from their usual places (the environment,
their login); we neither read nor write any, and our messages about failures redact them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.core.redact import redact
from shardwise.observe.metrics import Record, flat

NESTED = {"losses": "loss", "breakdown": "seconds"}  # mappings within a record, and what their entries are called
NO_FIGURES = frozenset({"kind", "step", "time"})
MOST_WAITING = 10_000  # records; beyond that the tracker is too slow, and loses the oldest
LAST_SECONDS = 20.0  # that it has at the end of the run to take what waits
HURRIED_SECONDS = 1.0
LONGEST = 250  # characters of a setting


class Tracker(Protocol):
    """Interface of a tracker."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Logs the metrics of one step."""

    def close(self) -> None:
        """Flushes and closes the tracker."""


Open = Callable[[Path, dict[str, Any], int], Tracker]  # output folder, flat settings, step that the run goes on from


class Trackers:
    """All trackers of a run; `put` never blocks, `troubles` returns failures to report."""

    def __init__(self, openers: dict[str, Open], output: Path, settings: dict[str, Any], step: int) -> None:
        settings_of_all = flat(settings) if openers else ()
        redacted = {name: redact(str(value))[:LONGEST] for name, value in settings_of_all}
        self._lanes = [_Lane(name, opener, output, redacted, step) for name, opener in openers.items()]

    def put(self, record: Record) -> None:
        """Queues a record of training or evaluation."""
        for lane in self._lanes:
            lane.put(record)

    def troubles(self) -> list[str]:
        """Failures since the last call, each once."""
        return [lane.told() for lane in self._lanes if lane.failed and not lane.was_told]

    def close(self, failed: bool = False) -> None:
        """Waits a bounded time for queued records; shorter after a failure."""
        deadline = time.monotonic() + (HURRIED_SECONDS if failed else LAST_SECONDS)
        for lane in self._lanes:
            lane.put(None)
        for lane in self._lanes:
            lane.close(deadline)


class _Lane:
    """One tracker in its thread."""

    def __init__(self, name: str, opener: Open, output: Path, settings: dict[str, Any], step: int) -> None:
        self.name = name
        self.failed = ""
        self.was_told = False
        self._queue: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(
            target=self._run, args=(opener, output, settings, step), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def put(self, record: Record | None) -> None:
        if self.failed:
            return
        while True:
            try:
                return self._queue.put_nowait(record)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()

    def told(self) -> str:
        self.was_told = True
        return f"log.trackers: {self.name} failed and gets no more figures ({self.failed}); metrics.jsonl has them all"

    def close(self, deadline: float) -> None:
        self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self.failed:
            self.failed = "it did not take its last figures in time"

    def _run(self, opener: Open, output: Path, settings: dict[str, Any], step: int) -> None:
        try:
            tracker = opener(output, settings, step)
            while (record := self._queue.get()) is not None:
                if figures := figures_of(record):
                    tracker.log(int(record["step"]), figures)
            tracker.close()
        except BaseException as error:  # whatever it throws, SystemExit too: training goes on
            first = (str(error).strip().splitlines() or [""])[0]
            self.failed = redact(f"{type(error).__name__}: {first}")[:LONGEST]


def figures_of(record: Record) -> dict[str, float]:
    """Numbers of a record by name: `train/loss`, `eval/loss/web`, `train/seconds/forward`."""
    kind = record.get("kind")
    figures = dict[str, Any]()
    for name, value in record.items():
        if name in NESTED and isinstance(value, dict):
            figures |= {f"{kind}/{NESTED[name]}/{inner}": v for inner, v in value.items() if _is_number(v)}
        elif name not in NO_FIGURES and _is_number(value):
            figures[f"{kind}/{name}"] = value
    return {name: float(value) for name, value in figures.items()}


def openers_of(names: Sequence[str]) -> dict[str, Open]:
    """Constructors of the trackers by name; the packages are imported in their threads."""
    known: dict[str, Open] = {
        "tensorboard": _Tensorboard, "wandb": _Wandb, "trackio": _Trackio, "mlflow": _Mlflow,
    }  # fmt: skip
    return {name: known[name] for name in names}


class _Tensorboard:
    """TensorBoard event files in output/tensorboard; a resumed run hides the steps after its checkpoint."""

    def __init__(self, output: Path, settings: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(output / "tensorboard"), purge_step=step + 1 if step else None)
        rows = "".join(f"| {name} | {value.replace('|', '¦')} |\n" for name, value in settings.items())
        self._writer.add_text("settings", f"| setting | value |\n| --- | --- |\n{rows}", step)

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A W&B run per output folder, so that a resumed run continues it."""

    def __init__(self, output: Path, settings: dict[str, Any], step: int) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "shardwise")
        self._run: Any = wandb.init(
            project=project, name=output.name, id=_tracker_run_id(output, "wandb"), resume="allow", dir=str(output),
            config=settings,
        )  # fmt: skip

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Trackio's database, wherever it is configured."""

    def __init__(self, output: Path, settings: dict[str, Any], step: int) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "shardwise"),
            name=f"{output.name}-{_tracker_run_id(output, 'trackio')}",
            config=settings,
            resume="allow",
        )

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._trackio.log(figures, step=step)

    def close(self) -> None:
        self._trackio.finish()


class _Mlflow:
    """The server of MLFLOW_TRACKING_URI, else a database in the output folder."""

    def __init__(self, output: Path, settings: dict[str, Any], step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(output / 'mlflow.db').absolute()}"
        self._client: Any = MlflowClient(place)
        self._metric: Any = Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shardwise")
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=output.name)
        self._id = run.info.run_id
        params = [Param(name, value) for name, value in settings.items() if value]
        for at in range(0, len(params), 100):  # as many as it takes at once
            self._client.log_batch(self._id, params=params[at : at + 100])

    def log(self, step: int, figures: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in figures.items()]
        for at in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[at : at + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _tracker_run_id(output: Path, tracker: str) -> str:
    """The id under which a tracker knows this output folder; not a secret."""
    file = output / "trackers.json"
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(file.read_text()))
    if tracker not in known:
        known[tracker] = secrets.token_hex(4)
        file.write_text(json.dumps(known))
    return known[tracker]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
