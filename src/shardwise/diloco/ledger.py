"""What the meeting point keeps, in files: the state of each round, written whole before anyone is told of it.

    state.json          round, plan, members, figures of the last round; replaced atomically
    round-00000012/     global-00000 … (parameters), rest-00000 … (momentum, what rounding lost), update-00000 … (sent)
    incoming/WORKER/    parts of differences on their way in; of no use after a restart
    rounds.jsonl        one JSON object per round

Files are the state, not a copy of it: a part at a time is in memory, whatever the model's size, and a meeting point
that is killed loses the round under way and nothing else. The last two rounds stay, for workers that are slow to fetch.
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
    """A worker's part in a round."""

    worker: str
    tokens: int
    step: int
    last: bool
    late: bool


@dataclass(frozen=True)
class Made:
    """What a round came to."""

    digest: str
    mean_norm: float
    norms: dict[str, float]
    distances: dict[str, float]


class RoundLedger:
    """The files of one meeting point."""

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
        """What was last written down; None for a fresh folder."""
        try:
            return dict(json.loads((self.root / STATE).read_text()))
        except FileNotFoundError:
            return None

    def write_state(self, values: dict[str, Any]) -> None:
        """Atomically, and on the disk when it returns."""
        write_atomically(self.root / STATE, json.dumps(values, indent=1).encode())
        sync_folder(self.root)

    def note(self, record: dict[str, Any]) -> None:
        """One more line of rounds.jsonl."""
        with (self.root / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def folder(self, number: int) -> Path:
        """The files of a round."""
        return self.root / f"round-{number:08d}"

    def part(self, number: int, kind: str, index: int) -> Path:
        """One file of a round."""
        return self.folder(number) / f"{kind}-{index:05d}"

    def arriving(self, worker: str, index: int) -> Path:
        """Where a worker's part is put; its name may be anything, so it is not part of the path."""
        return self.incoming / hashlib.sha256(worker.encode()).hexdigest()[:32] / f"{index:05d}"

    def forget(self, worker: str) -> None:
        """What a worker sent is used, or of no use."""
        shutil.rmtree(self.arriving(worker, 0).parent, ignore_errors=True)

    def begin(self, worker: str, plan: VectorPlan) -> str:
        """Round 0 from the parts that a worker gave; returns their digest."""

        def make(folder: Path, index: int) -> torch.Tensor:
            values = decode(self.arriving(worker, index).read_bytes(), "fp32", plan.size(index))
            _save(folder / f"global-{index:05d}", {KEY: values})
            return values

        digest = self._write_round(0, plan, make)
        self.forget(worker)
        return digest

    def advance(
        self, number: int, plan: VectorPlan, arrivals: list[Arrival], weights: list[float], rule: OuterRule
    ) -> Made:
        """The outer step from round `number` to the next, a part at a time."""
        squares = {a.worker: [0.0, 0.0] for a in arrivals}
        whole = [0.0]

        def make(folder: Path, index: int) -> torch.Tensor:
            size = plan.size(index)
            before = load_file(self.part(number, "global", index))[KEY]
            rest = load_file(found) if (found := self.part(number, "rest", index)).exists() else {}
            came = [decode(self.arriving(a.worker, index).read_bytes(), rule.dtype, size) for a in arrivals]
            mean = mean_of(came, weights)
            whole[0] += float(mean.square().sum())
            for arrival, difference in zip(arrivals, came, strict=True):
                own = difference.double()
                squares[arrival.worker][0] += float(own.square().sum())
                squares[arrival.worker][1] += float((own - mean).square().sum())
            after, velocity = outer_step(before, rest.get("velocity"), mean, rule)
            kept = {} if velocity is None else {"velocity": velocity}
            if rule.dtype != "fp32":
                # Workers add up what they were sent, rounded: so do we, and all have the same parameters to the bit.
                lost = rest.get("lost", torch.zeros(size)).clone()
                body = encode(after - before, rule.dtype, lost)
                after = before + decode(body, rule.dtype, size)
                kept["lost"] = lost
                _write(folder / f"update-{index:05d}", body)
            _save(folder / f"global-{index:05d}", {KEY: after})
            if kept:
                _save(folder / f"rest-{index:05d}", kept)
            return after

        digest = self._write_round(number + 1, plan, make)
        norms = {name: sqrt(own) for name, (own, _) in squares.items()}
        return Made(digest, sqrt(whole[0]), norms, {name: sqrt(far) for name, (_, far) in squares.items()})

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
        """Rounds that nobody can ask for any more."""
        for folder in self.root.glob("round-*"):
            if int(folder.name.removeprefix("round-")) not in (newest, newest - 1):
                shutil.rmtree(folder, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """A file that is there whole or not at all."""
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
