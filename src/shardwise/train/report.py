"""What is told in training: the live line, metrics.jsonl and remarks by the main rank; by each rank a line of its own.

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
from shardwise.train.heldout import Evaluation
from shardwise.train.setup import TrainState
from shardwise.train.status import logs_of

LARGE = 50_000_000  # parameters from which writing and exporting take more than a moment
BREAKDOWN_INTERVAL = 1.0  # seconds between breakdowns on the terminal: a fast run stays readable


class TrainReport:
    """On the main rank: the live line and metrics.jsonl. On each its own figures; on a host's first the host's."""

    def __init__(self, state: TrainState, total: int) -> None:
        run, self._active, self._scaler = state.job.run, state.world.is_main, state.scaler
        self._looked, self._large = False, state.job.parameters >= LARGE
        world, logs = state.world, logs_of(state.job.output)
        self._own = RankFile(logs, world.rank, world.size, _device_name(world.device))
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
            self._timer, self._told_at = state.timer, -math.inf
            device = state.world.device
            cuda = device.type == "cuda"
            self._memory = MemoryWatch(
                torch.cuda.get_device_properties(device).total_memory if cuda else 0
            )

    def __enter__(self) -> TrainReport:
        self._host.__enter__()
        if self._active:
            self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._host.__exit__(*error)
        self._own.close(f"{type(error[1]).__name__}: {error[1]}"[:500] if error[1] else "left")
        if self._active:
            self._trackers.close(failed=error[1] is not None)
            for line in self._timer.summary() + self._trackers.troubles():
                self._progress.note(line)
            self._progress.__exit__(*error)
            self._file.close()

    def trained(self, records: list[dict[str, Any]], waiting: float | None = None) -> None:
        """New training records, oldest first; `waiting`: this rank's share of a step, for others, of late."""
        self._own.report(records, waiting)
        for record in records if self._active else []:
            if self._scaler.is_enabled() and not math.isfinite(record["grad_norm"]):
                record["skipped"] = True
                now = self._scaler.get_scale()
                self._progress.note(
                    f"step {record['step']}: gradients overflowed fp16, update skipped; loss scale {now:g}"
                )
            elif why := record.get("why"):
                self._progress.note(f"step {record['step']}: {why}; its update was skipped")
            self._file.append(record)
            self._trackers.put(record)
            self._progress.update(record)
            if trouble := self._memory.warning(record):
                self._progress.note(trouble)
            if "breakdown" in record and time.monotonic() - self._told_at >= BREAKDOWN_INTERVAL:
                self._told_at = time.monotonic()
                self._progress.note(f"step {record['step']}  {breakdown_line(record['breakdown'])}")
        self.noted(self._trackers.troubles() if self._active else [])

    def first_gradients(self, state: TrainState) -> None:
        """Once: says what is to be trained but has no gradient, which would stay as it is in silence."""
        if self._active and not self._looked:
            if idle := without_gradient(state.sharded, state.update):
                self._progress.note(idle)
            self._looked = True

    def noted(self, lines: list[str]) -> None:
        """Something to be told once."""
        for line in lines if self._active else []:
            self._progress.note(line)

    def evaluated(self, step: int, held_out: Evaluation) -> None:
        """A new evaluation."""
        if self._active:
            record = {"kind": "eval", "step": step, **held_out.record, "time": time.time()}
            self._file.append(record)
            self._trackers.put(record)
            self._progress.evaluated(record)

    def met(self, record: dict[str, Any]) -> None:
        """A meeting with workers that train apart."""
        if self._active:
            self._file.append(record | {"time": time.time()})
            self._progress.note(f"step {record['step']}: {_met(record)}")

    def slow(self, records: list[dict[str, Any]]) -> None:
        """Ranks that were found to keep the others waiting."""
        for record in records if self._active else []:
            self._file.append(record)
            self._progress.note(describe_slow_rank(record))

    def ending(self, words: str) -> None:
        """What is still to do after the last step, where that takes more than a moment."""
        self.noted([words] if self._large else [])

    def ended(self, early: str) -> None:
        """Why there are no more steps, where it is not that all are done."""
        if self._active and early:
            self._progress.note(early)


def _met(record: dict[str, Any]) -> str:
    """A meeting, in words."""
    if record.get("left"):
        return "left the other workers before they met"
    count, seconds = len(record["workers"] or []), record["seconds_waited"]
    waited = f"round {record['round']}, {count} worker{'s' * (count != 1)}, waited {seconds:.1f} s"
    if record.get("lost"):
        return f"{waited}: came too late to be counted, went on from the others'"
    return f"met the others: {waited}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
