"""Reports of training: the main rank's live line, metrics.jsonl and notes; a file for each rank.

`shardwise watch` draws its dashboard from these files.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from shardwise.observe.breakdown import breakdown_line
from shardwise.observe.memory import MemoryWatch
from shardwise.observe.metrics import MetricsFile
from shardwise.observe.pace import describe_slow_rank
from shardwise.observe.progress import Progress
from shardwise.observe.ranks import HostFigures, RankFile, host_file
from shardwise.observe.tables import Tables
from shardwise.observe.trackers import Trackers, openers_of
from shardwise.parallel.selfcheck import without_gradient
from shardwise.train.evaluation import Evaluation
from shardwise.train.setup import TrainState
from shardwise.train.status import logs_of

LARGE = 50_000_000  # parameters from which saving and exporting take long enough to announce
BREAKDOWN_INTERVAL = 1.0  # seconds between breakdowns on the terminal, to keep it readable


class TrainReport:
    """Live line and metrics.jsonl on the main rank; a file of figures for each rank and host.

    The first rank of each host writes the host's figures.
    """

    def __init__(self, state: TrainState, total: int) -> None:
        run = state.job.run
        world = state.world
        logs = logs_of(state.job.output)
        self._active = world.is_main
        self._scaler = state.scaler
        self._gradients_checked = False
        self._large = state.job.parameters >= LARGE
        self._rank_file = RankFile(logs, world.rank, world.size, _device_name(world.device))
        self._host: AbstractContextManager[Any] = nullcontext()
        if world.local_rank == 0:
            self._host = HostFigures(host_file(logs, world.rank), state.job.output)
        if self._active:
            tables = Tables(Path(run.log.csv).expanduser()) if run.log.csv else None
            self._file = MetricsFile(state.job.output / "metrics.jsonl", tables)
            self._file.truncate_after(state.position.step)
            for record in state.damaged:
                self._file.append(record)
            self._progress = Progress(total, state.position.step)
            self._trackers = Trackers(
                openers_of(run.log.trackers),
                state.job.output,
                run.model_dump(mode="json"),
                state.position.step,
            )
            self._timer = state.timer
            self._breakdown_at = -math.inf  # time of the last breakdown on the terminal
            memory = 0
            if world.device.type == "cuda":
                memory = torch.cuda.get_device_properties(world.device).total_memory
            self._memory = MemoryWatch(memory)

    def __enter__(self) -> TrainReport:
        self._host.__enter__()
        if self._active:
            self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._host.__exit__(*error)
        reason = f"{type(error[1]).__name__}: {error[1]}"[:500] if error[1] else "left"
        self._rank_file.close(reason)
        if self._active:
            self._trackers.close(failed=error[1] is not None)
            for line in self._timer.summary() + self._trackers.troubles():
                self._progress.note(line)
            self._progress.__exit__(*error)
            self._file.close()

    def trained(self, records: list[dict[str, Any]], waiting: float | None = None) -> None:
        """Reports new records of steps, oldest first.

        `waiting`: the share of recent steps that this rank waited for others.
        """
        self._rank_file.report(records, waiting)
        if not self._active:
            return
        for record in records:
            if self._scaler.is_enabled() and not math.isfinite(record["grad_norm"]):
                record["skipped"] = True
                scale = self._scaler.get_scale()
                self._progress.note(
                    f"step {record['step']}: gradients overflowed fp16, update skipped; "
                    f"loss scale {scale:g}"
                )
            elif why := record.get("why"):
                self._progress.note(f"step {record['step']}: {why}; its update was skipped")
            self._file.append(record)
            self._trackers.put(record)
            self._progress.update(record)
            if trouble := self._memory.warning(record):
                self._progress.note(trouble)
            now = time.monotonic()
            if "breakdown" in record and now - self._breakdown_at >= BREAKDOWN_INTERVAL:
                self._breakdown_at = now
                self._progress.note(f"step {record['step']}  {breakdown_line(record['breakdown'])}")
        self.noted(self._trackers.troubles())

    def first_gradients(self, state: TrainState) -> None:
        """Reports, once, trainable parameters without a gradient, which would never change."""
        if self._active and not self._gradients_checked:
            if idle := without_gradient(state.sharded, state.update):
                self._progress.note(idle)
            self._gradients_checked = True

    def noted(self, lines: list[str]) -> None:
        """Prints lines above the live line."""
        if self._active:
            for line in lines:
                self._progress.note(line)

    def evaluated(self, step: int, held_out: Evaluation) -> None:
        """Reports a new evaluation."""
        if self._active:
            record = {"kind": "eval", "step": step, **held_out.record, "time": time.time()}
            self._file.append(record)
            self._trackers.put(record)
            self._progress.evaluated(record)

    def met(self, record: dict[str, Any]) -> None:
        """Reports a synchronisation with other workers (DiLoCo)."""
        if self._active:
            self._file.append(record | {"time": time.time()})
            self._progress.note(f"step {record['step']}: {_met(record)}")

    def slow(self, records: list[dict[str, Any]]) -> None:
        """Reports ranks that keep the others waiting."""
        if self._active:
            for record in records:
                self._file.append(record)
                self._progress.note(describe_slow_rank(record))

    def ending(self, activity: str) -> None:
        """Announces work after the last step, if the model is so large that it takes a while."""
        if self._large:
            self.noted([activity])

    def ended(self, early: str) -> None:
        """Reports why the run ended early, if it did."""
        if early:
            self.noted([early])


def _met(record: dict[str, Any]) -> str:
    """Describes a synchronisation with other workers."""
    if record.get("left"):
        return "left the other workers before they met"
    count = len(record["workers"] or [])
    workers = f"{count} worker" if count == 1 else f"{count} workers"
    waited = f"round {record['round']}, {workers}, waited {record['seconds_waited']:.1f} s"
    if record.get("lost"):
        return f"{waited}: came too late to be counted, went on from the others'"
    return f"met the others: {waited}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
