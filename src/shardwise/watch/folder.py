"""One run as read from its output folder: metrics, state, ranks, hosts, checkpoints, logs, samples, settings."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from pathlib import Path
from typing import Any

from shardwise.checkpoint.folders import list_checkpoints, step_of
from shardwise.config.advanced import written
from shardwise.config.renamed import rename
from shardwise.observe.metrics import flat
from shardwise.observe.ranks import host_file
from shardwise.watch.columns import Column, Columns, Points
from shardwise.watch.ranks import rank_numbers, rank_rows, starts_of
from shardwise.watch.state import state_of
from shardwise.watch.tail import Tail, last_lines, read_json, sampled

LARGE = 8 << 20  # bytes that are read in the background, behind a first look: some 10,000 steps
GIVE_WAY = 1.0  # seconds that the page has to itself before the whole file is read: it is drawn from the first look
FIRST_LOOK = 2000  # records of it
FRESH = 0.4  # seconds that what was read counts as new: several open pages cost no more than one
MOST_LINES = 400  # of a log
MOST_SAMPLES = 200
HOST_POINTS = 600


class RunFolder:
    """Follows one run's folder as it grows; thread-safe."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.id = hashlib.sha256(str(path).encode()).hexdigest()[:12]
        self.columns = Columns()
        self._metrics, self._samples = Tail(path / "metrics.jsonl"), Tail(path / "samples.jsonl")
        self._hosts: dict[int, tuple[Tail, Columns]] = {}
        self._sample_records: list[dict[str, Any]] = []
        self._read_at = -math.inf
        self._sizes: dict[str, int] = {}
        self._lock = threading.RLock()
        self._reader: threading.Thread | None = None
        self._hurry = threading.Event()

    def refresh(self) -> None:
        """Reads what was written since the last call."""
        with self._lock:
            if time.monotonic() - self._read_at < FRESH:
                return
            self._read_metrics()
            samples, replaced = self._samples.read()
            self._sample_records = ([] if replaced else self._sample_records) + samples
            del self._sample_records[:-MOST_SAMPLES]
            for rank in self.ranks():
                file = host_file(self.path / "logs", rank)
                if rank not in self._hosts and file.is_file():
                    self._hosts[rank] = Tail(file), Columns()
            for tail, columns in self._hosts.values():
                self._take(tail, columns, "time")
            self._read_at = time.monotonic()

    def _read_metrics(self) -> None:
        if self._reader is not None:
            if self._reader.is_alive():
                return
            self._reader = None
        if self._metrics.unread() > LARGE:
            self.columns = Columns(self.columns.generation + 1)
            for record in sampled(self._metrics.path, FIRST_LOOK):
                self.columns.add(record)
            self._reader = threading.Thread(target=self._read_all, name=f"read {self.name}", daemon=True)
            self._reader.start()
            return
        self._take(self._metrics, self.columns)

    def _read_all(self) -> None:
        """Reads the full file from its start, replacing the initial sample of it."""
        tail = Tail(self._metrics.path)
        columns = Columns(self.columns.generation + 1)
        self._hurry.wait(GIVE_WAY)
        self._take(tail, columns, pause=0.001)
        with self._lock:
            self._metrics, self.columns = tail, columns

    @property
    def reading(self) -> bool:
        """Whether the metrics are still an initial sample of the file."""
        return self._reader is not None and self._reader.is_alive()

    def wait(self) -> None:
        """Waits until the full file has been read, for one-time readers."""
        self._hurry.set()
        self.refresh()
        if self._reader is not None:
            self._reader.join()

    @staticmethod
    def _take(tail: Tail, columns: Columns, axis: str = "step", pause: float = 0.0) -> None:
        while True:
            records, replaced = tail.read()
            if replaced:
                columns.clear()
            for record in records:
                columns.add(record, axis)
            if not tail.behind:
                return
            if pause:
                time.sleep(pause)  # whoever asks for something meanwhile goes first

    def ranks(self) -> list[int]:
        """Numbers of the ranks that have written a file."""
        return rank_numbers(self.path / "logs")

    def series(
        self,
        points: int,
        generation: int | None = None,
        after: dict[str, float] | None = None,
        first: float = -math.inf,
        last: float = math.inf,
    ) -> dict[str, Any]:
        """The curves: full, points after the caller's last steps (of the same generation), or a range."""
        self.refresh()
        with self._lock:
            known = (after or {}) if generation == self.columns.generation else {}
            kinds = {
                kind: _parts(columns, points, known.get(kind, -math.inf), first, last)
                for kind, columns in self.columns.kinds.items()
            }
            ends = {kind: self.columns.end(kind) for kind in kinds}
            header = {"generation": self.columns.generation, "whole": not known, "reading": self.reading}
            return header | {"ends": ends, "kinds": kinds}

    def overview(self) -> dict[str, Any]:
        """One-line overview: name, state, progress and latest metrics."""
        self.refresh()
        with self._lock:
            train = self.columns.latest.get("train", {})
            evaluated = self.columns.latest.get("eval", {})
        logs = self.path / "logs"
        seconds = step_seconds(train)
        state = state_of(self.path, starts_of(logs, self.ranks()), seconds)
        return {
            "id": self.id, "name": self.name, "state": state.json(), "step": train.get("step"),
            "total": self.settings().get("train.steps"), "loss": train.get("loss"), "eval_loss": evaluated.get("loss"),
            "tokens_per_second": train.get("tokens_per_second"), "eta_seconds": train.get("eta_seconds"),
        }  # fmt: skip

    def detail(self) -> dict[str, Any]:
        """Everything except the curves."""
        overview = self.overview()
        logs = self.path / "logs"
        numbers = self.ranks()
        starts = starts_of(logs, numbers)
        running = overview["state"]["word"] in ("running", "starting", "silent")
        rows = rank_rows(logs, numbers)
        if not running:  # who stands where is of no use any more, and an old silence is no sign
            for row in rows:
                row |= {"amiss": "", "silent": None}
        with self._lock:
            last = self._sample_records[-1].get("step") if self._sample_records else 0
            return overview | {
                "latest": self.columns.latest.get("train", {}), "evaluated": self.columns.latest.get("eval", {}),
                "ranks": rows, "devices": sorted({str(s.get("device")) for s in starts}),
                "hosts": [columns.latest["host"] for _, columns in self._hosts.values() if columns.latest],
                "checkpoints": self.checkpoints(), "prediction": _prediction(self.path),
                "samples": f"{len(self._sample_records)} to step {last}", "model": _model(self.settings()),
                "folder": str(self.path),
            }  # fmt: skip

    def hosts(self, after: float = -math.inf) -> dict[str, Any]:
        """Host metrics over time."""
        self.refresh()
        with self._lock:
            return {
                str(rank): {
                    "name": str(columns.latest.get("host", {}).get("host", "")),
                    "figures": _parts(columns.kinds.get("host", {}), HOST_POINTS, after),
                }
                for rank, (_, columns) in self._hosts.items()
            }

    def checkpoints(self) -> list[dict[str, Any]]:
        """Checkpoints, oldest first: step, bytes, time, and which is the best."""
        folders = list_checkpoints(self.path / "checkpoints")
        best = read_json(folders[-1] / "trainer.json") if folders else {}
        rows = []
        for folder in folders:
            step = step_of(folder)
            try:
                written = folder.stat().st_mtime
            except OSError:
                continue  # it was removed meanwhile
            rows.append({
                "step": step, "bytes": self._size(folder), "time": written,
                "best": step is not None and step == best.get("best_step"),
                "value": best.get("best_value") if step == best.get("best_step") else None,
                "metric": best.get("best_metric") if step == best.get("best_step") else None,
            })  # fmt: skip
        return rows

    def _size(self, folder: Path) -> int:
        """Size of a checkpoint in bytes, cached: a named checkpoint never changes."""
        key = f"{folder}@{folder.stat().st_mtime_ns}"
        if key not in self._sizes:
            total = 0
            for file in folder.rglob("*"):
                try:
                    total += file.stat().st_size if file.is_file() else 0
                except OSError:
                    continue
            self._sizes[key] = total
        return self._sizes[key]

    def log(self, rank: int, lines: int) -> list[str] | None:
        """The last lines of a rank's log; None if there is no such rank."""
        if rank not in self.ranks():
            return None
        return last_lines(self.path / "logs" / f"rank-{rank}.log", min(lines, MOST_LINES))

    def samples(self) -> list[dict[str, Any]]:
        """Samples generated during training, oldest first."""
        self.refresh()
        with self._lock:
            return list(self._sample_records)

    def settings(self) -> dict[str, Any]:
        """The resolved settings by dotted path, e.g. `train.learning_rate`."""
        run = read_json(self.path / "job.json").get("run")
        if not isinstance(run, dict):
            folders = list_checkpoints(self.path / "checkpoints")
            run = read_json(folders[-1] / "run.json") if folders else {}
        rename(run)
        return {written(path): value for path, value in flat(run)}


def step_seconds(record: dict[str, Any]) -> float | None:
    """Seconds per step, from the record's own throughput."""
    tokens, speed = record.get("tokens"), record.get("tokens_per_second")
    return tokens / speed if tokens and speed else None


def differences(runs: list[RunFolder]) -> list[dict[str, Any]]:
    """Settings in which runs differ, each with its value by run."""
    settings = {run.id: run.settings() for run in runs}
    names = list(dict.fromkeys(name for values in settings.values() for name in values))
    rows = []
    for name in names:
        by_run = {key: values.get(name) for key, values in settings.items()}
        if len(set(map(repr, by_run.values()))) > 1:
            rows.append({"name": name, "values": by_run})
    return rows


def _model(settings: dict[str, Any]) -> str | None:
    """Short name of the model."""
    name = settings.get("model.name") or settings.get("model.config.model_type")
    return str(name) if name else None


def _parts(
    columns: dict[str, Column], points: int, after: float, first: float = -math.inf, last: float = math.inf
) -> dict[str, Points]:
    parts = {name: column.part(points, after, first, last) for name, column in columns.items()}
    return {name: part for name, part in parts.items() if part is not None}


def _prediction(folder: Path) -> dict[str, Any] | None:
    prediction = read_json(folder / "prediction.json")  # as observe/prediction.py leaves it, which would load torch
    names = ("memory", "foreseen_bytes", "foreseen_seconds", "limit", "device", "kind")
    return {name: prediction.get(name) for name in names} if prediction else None
