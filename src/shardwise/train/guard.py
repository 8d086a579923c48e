"""Guards against NaN losses or gradients and loss spikes: stop, skip the update, or go back.

To skip, a step's norm (and loss, for spikes) is read before the update, which waits for the device
in each step. Going back costs nothing until it happens: the guard checks the reported figures; on
trouble the run ends, restarts from its last checkpoint and leaves out the sequences from there to
where the numbers went wrong. These are recorded in skipped.jsonl, which a later start reads.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.config.schema import Guard as Settings
from shardwise.core.errors import RunFailed
from shardwise.distributed.mesh import World
from shardwise.train.checksum import differing
from shardwise.train.meter import not_finite
from shardwise.train.state import Position

FILE = "skipped.jsonl"
FEWEST = 20  # losses needed to tell a spike from noise


class GoBack(RunFailed):
    """Restarts the run from its last checkpoint, without the sequences since."""

    kind = "back"


class LossGuard:
    """Checks each step's figures by the settings; every rank comes to the same decision."""

    def __init__(self, settings: Settings, world: World, output: Path, scaled: bool) -> None:
        self._settings = settings
        self._world = world
        self._file = output / FILE
        self._scaled = scaled
        self._recent: deque[tuple[float, int]] = deque(maxlen=settings.window)  # losses and units
        self._why: dict[int, str] = {}  # reasons for the steps skipped since the last report
        self._spent = 0  # recoveries so far
        self._compared = 0  # step of the last comparison of replicas

    def resume(self, position: Position) -> list[str]:
        """Moves the position past the sequences that an earlier start left out; reports them."""
        until = position.sequences
        spent = 0
        if self._world.is_main:
            remaining = []
            for entry in read_skipped(self._file):
                is_later = entry["step"] > position.step
                went_back = entry["did"] == "back"
                spent += is_later or went_back
                if is_later and went_back:
                    until = max(until, entry["until"])
                if went_back or not is_later:
                    remaining.append(entry)
            _rewrite(self._file, remaining)
        self._compared = position.step
        agreed = torch.tensor([until, spent])
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._world.control)
        until, self._spent = agreed.tolist()
        count = until - position.sequences
        if count <= 0:
            return []
        position.sequences = until
        return [f"leaving out {count} sequences, on which the numbers went wrong ({FILE})"]

    def allowing(
        self, step: int, until: int, summed: torch.Tensor, units: int
    ) -> Callable[[torch.Tensor], bool] | None:
        """A check of the gradient norm that allows the update; None if updates are never skipped.

        `until`: number of sequences up to the end of this step's data.
        """
        settings = self._settings
        if not settings.skips:
            return None

        def allowed(norm: torch.Tensor) -> bool:
            why = ""
            if settings.nan == "skip" and not self._scaled and not math.isfinite(float(norm)):
                why = f"the gradient norm is {float(norm)}"
            if settings.spike is not None and settings.on_spike == "skip":
                loss = summed.reshape(-1)[:1].float().cpu()
                dist.all_reduce(loss, group=self._world.control)
                why = why or self._spike(float(loss) / max(1, units), units)
            if why:
                self._why[step] = why
                self._note(step, why, "skip", until)
                if failure := self._count(f"{why} at step {step}"):
                    raise failure
            return not why

        return allowed

    def look(self, records: list[dict[str, Any]], position: Position) -> RunFailed | None:
        """Marks the steps that were skipped; returns the failure to end this start with, if any."""
        settings = self._settings
        updated = []
        for record in records:
            if why := self._why.pop(record["step"], ""):
                record |= {"skipped": True, "why": why}
            else:
                updated.append(record)
        if trouble := not_finite(updated, self._scaled):
            return self._end(settings.nan, trouble, position)
        if settings.spike is None or settings.on_spike == "skip":
            return None
        for record in updated:
            if why := self._spike(record["loss"], record["supervised_tokens"]):
                why += f" at step {record['step']}"
                remedy = "\n  → lower train.learning_rate, or let it go back: guard.on_spike: back"
                return self._end(settings.on_spike, why + remedy, position)
        return None

    def compare(self, tensors: Callable[[], dict[str, Any]], step: int) -> RunFailed | None:
        """Compares replicas (checksum.py) when due; returns a failure if they differ."""
        every = self._settings.checksum
        mesh = self._world.mesh["replicate"]
        if every is None or step // every == self._compared // every or mesh.size() == 1:
            return None
        before = self._compared
        self._compared = step
        difference = differing(tensors(), mesh.get_group(), self._world.control)
        if not difference:
            return None
        return RunFailed(
            f"{difference} at step {step}: its memory or its computing has failed "
            f"(they were alike at step {before})\n"
            "  → check or leave out that rank's device and host, and go on from a checkpoint of "
            f"step {before} or before with resume=FOLDER"
        )

    def _spike(self, loss: float, units: int) -> str:
        """Describes a loss far above the recent ones; "" for others, which are remembered.

        A mean over fewer units scatters more: the last step of an epoch may have few.
        """
        assert self._settings.spike is not None
        count = len(self._recent)
        if count >= min(FEWEST, self._settings.window):
            losses, unit_counts = zip(*self._recent, strict=True)
            mean = statistics.fmean(losses)
            deviation = max(statistics.pstdev(losses), 0.01 * abs(mean))
            wider = math.sqrt(max(1.0, statistics.fmean(unit_counts) / max(1, units)))
            bound = mean + self._settings.spike * deviation * wider
            if loss > bound:
                recent = f"mean {mean:.4g} of {count} steps, bound {bound:.4g}"
                return f"the loss leapt to {loss:.4g} ({recent})"
        if math.isfinite(loss):
            self._recent.append((loss, units))
        return ""

    def _end(self, wanted: str, trouble: str, position: Position) -> RunFailed:
        if wanted != "back":
            return RunFailed(trouble)
        why = trouble.split("\n")[0]
        self._note(position.step, why, "back", position.sequences)
        too_often = self._count(why)
        return too_often or GoBack(
            f"{why}: going back to the last checkpoint, past the sequences since"
        )

    def _count(self, why: str) -> RunFailed | None:
        self._spent += 1
        if self._spent <= self._settings.max_recoveries:
            return None
        return RunFailed(
            f"{why}, after {self._settings.max_recoveries} others were skipped or gone back from "
            "(advanced.guard.max_recoveries)\n"
            f"  → lower train.learning_rate, look at the data named in {FILE}, or raise "
            "advanced.guard.max_recoveries; what is in that file stays left out and counted "
            "(resume=never begins anew)"
        )

    def _note(self, step: int, why: str, did: str, until: int) -> None:
        if self._world.is_main:
            entry = {"step": step, "did": did, "why": why, "until": until}
            with self._file.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def read_skipped(file: Path) -> list[dict[str, Any]]:
    """Entries of skipped.jsonl, oldest first; a line cut off by a crash is ignored."""
    if not file.is_file():
        return []
    entries = []
    for line in file.read_text().splitlines():
        try:
            entries.append(dict(json.loads(line)))
        except ValueError:
            break
    return entries


def _rewrite(file: Path, entries: list[dict[str, Any]]) -> None:
    if file.is_file():
        temporary = file.with_name(f".{file.name}")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        temporary.replace(file)
