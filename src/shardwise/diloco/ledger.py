"""State of the sync server in files: each round is written completely before any worker learns of it.

    state.json          round, plan, members, figures of the last round; replaced atomically
    round-00000012/     global-00000 … (parameters), rest-00000 … (momentum, rounding errors), update-00000 … (sent)
    incoming/WORKER/    parts of differences being received; discarded after a restart
    rounds.jsonl        one JSON object per round

Files are the state, not a copy of it: one part at a time is in memory, whatever the model's size, and a sync server
that is killed loses only the current round. The last two rounds are kept, for workers that are slow to fetch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shardwise.checkpoint.integrity import sync_folder
from shardwise.diloco.codec import KEY, VectorPlan, decode, encode
from shardwise.diloco.outer_step import OuterRule, mean_of, outer_step

STATE = "state.json"


@dataclass(frozen=True)
class Arrival:
    """A worker's contribution to a round."""

    worker: str
    tokens: int
    step: int
    last: bool
    late: bool


@dataclass(frozen=True)
class RoundResult:
    """Result of a round."""

    digest: str
    mean_norm: float
    norms: dict[str, float]
    distances: dict[str, float]


class RoundLedger:
    """The files of one sync server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.incoming, ignore_errors=True)
        for left_over in root.glob(".round-*"):
            shutil.rmtree(left_over, ignore_errors=True)

    @property
    def incoming(self) -> Path:
        return self.root / "incoming"

    def state(self) -> dict[str, Any] | None:
        """The last written state; None for a new folder."""
        try:
            return dict(json.loads((self.root / STATE).read_text()))
        except FileNotFoundError:
            return None

    def write_state(self, values: dict[str, Any]) -> None:
        """Writes the state atomically and durably."""
        write_atomically(self.root / STATE, json.dumps(values, indent=1).encode())
        sync_folder(self.root)

    def note(self, record: dict[str, Any]) -> None:
        """Appends a line to rounds.jsonl."""
        with (self.root / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def folder(self, number: int) -> Path:
        """Folder of a round."""
        return self.root / f"round-{number:08d}"

    def part(self, number: int, kind: str, index: int) -> Path:
        """Path of one file of a round."""
        return self.folder(number) / f"{kind}-{index:05d}"

    def arriving(self, worker: str, index: int) -> Path:
        """Path of a worker's part, by a hash of its name, which may contain anything."""
        return self.incoming / hashlib.sha256(worker.encode()).hexdigest()[:32] / f"{index:05d}"

    def forget(self, worker: str) -> None:
        """Deletes what a worker sent."""
        shutil.rmtree(self.arriving(worker, 0).parent, ignore_errors=True)

    def begin(self, worker: str, plan: VectorPlan) -> str:
        """Creates round 0 from the parts that a worker gave; returns their digest."""

        def make(folder: Path, index: int) -> torch.Tensor:
            values = decode(self.arriving(worker, index).read_bytes(), "fp32", plan.size(index))
            _save(folder / f"global-{index:05d}", {KEY: values})
            return values

        digest = self._write_round(0, plan, make)
        self.forget(worker)
        return digest

    def advance(
        self, number: int, plan: VectorPlan, arrivals: list[Arrival], weights: list[float], rule: OuterRule
    ) -> RoundResult:
        """Makes the outer step from round `number` to the next, one part at a time."""
        squares = {a.worker: [0.0, 0.0] for a in arrivals}
        mean_square = [0.0]

        def make(folder: Path, index: int) -> torch.Tensor:
            size = plan.size(index)
            before = load_file(self.part(number, "global", index))[KEY]
            state = load_file(state_file) if (state_file := self.part(number, "rest", index)).exists() else {}
            differences = [decode(self.arriving(a.worker, index).read_bytes(), rule.dtype, size) for a in arrivals]
            mean = mean_of(differences, weights)
            mean_square[0] += float(mean.square().sum())
            for arrival, difference in zip(arrivals, differences, strict=True):
                own = difference.double()
                squares[arrival.worker][0] += float(own.square().sum())
                squares[arrival.worker][1] += float((own - mean).square().sum())
            after, velocity = outer_step(before, state.get("velocity"), mean, rule)
            new_state = {} if velocity is None else {"velocity": velocity}
            if rule.dtype != "fp32":
                # Workers add up what they were sent, rounded: so do we, and all have the same parameters to the bit.
                lost = state.get("lost", torch.zeros(size)).clone()
                body = encode(after - before, rule.dtype, lost)
                after = before + decode(body, rule.dtype, size)
                new_state["lost"] = lost
                _write(folder / f"update-{index:05d}", body)
            _save(folder / f"global-{index:05d}", {KEY: after})
            if new_state:
                _save(folder / f"rest-{index:05d}", new_state)
            return after

        digest = self._write_round(number + 1, plan, make)
        norms = {name: sqrt(own) for name, (own, _) in squares.items()}
        return RoundResult(digest, sqrt(mean_square[0]), norms, {name: sqrt(far) for name, (_, far) in squares.items()})

    def _write_round(self, number: int, plan: VectorPlan, make: Callable[[Path, int], torch.Tensor]) -> str:
        target = self.folder(number)
        partial = target.with_name(f".{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        digest = hashlib.sha256()
        for index in range(plan.parts):
            digest.update(make(partial, index).numpy().tobytes())
        sync_folder(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync_folder(self.root)
        return digest.hexdigest()

    def prune(self, newest: int) -> None:
        """Deletes rounds that can no longer be requested."""
        for folder in self.root.glob("round-*"):
            if int(folder.name.removeprefix("round-")) not in (newest, newest - 1):
                shutil.rmtree(folder, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    partial = path.with_name(f".{path.name}.partial")
    _write(partial, content)
    os.replace(partial, path)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
