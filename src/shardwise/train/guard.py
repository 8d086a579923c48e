"""Numbers gone wrong: a loss or gradient that is no number, or a loss that leaps. Stop, skip the update, or go back.

To skip, a step's norm (and loss, for leaps) is looked at before the update, which waits for the device in each step.
Going back costs nothing until it happens: what is reported is looked at, the run ends, starts again from its last
checkpoint and leaves out the sequences between that and where the numbers went wrong. What was left out is written to
skipped.jsonl, which a later start reads.
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
FEWEST = 20  # losses before a leap can be told from the noise


class GoBack(RunFailed):
    """The run is to go on from its last checkpoint, without the sequences in between."""

    kind = "back"


class LossGuard:
    """Looks at each step's numbers as the settings ask; every rank comes to the same answer."""

    def __init__(self, settings: Settings, world: World, output: Path, scaled: bool) -> None:
        self._settings, self._world, self._file, self._scaled = (
            settings,
            world,
            output / FILE,
            scaled,
        )
        self._recent: deque[tuple[float, int]] = deque(
            maxlen=settings.window
        )  # losses, and of how many units
        self._why: dict[int, str] = {}  # of the steps skipped since the last report
        self._spent = self._compared = 0

    def resume(self, position: Position) -> list[str]:
        """Moves the position past what an earlier start left out; says what."""
        until, spent = position.sequences, 0
        if self._world.is_main:
            entries = read_skipped(self._file)
            spent = sum(
                entry["step"] > position.step or entry["did"] == "back" for entry in entries
            )
            until = max(
                [
                    until,
                    *(
                        e["until"]
                        for e in entries
                        if e["did"] == "back" and e["step"] > position.step
                    ),
                ]
            )
            _rewrite(
                self._file, [e for e in entries if e["step"] <= position.step or e["did"] == "back"]
            )
        self._compared = position.step
        agreed = torch.tensor([until, spent])
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._world.control)
        until, self._spent = (int(value) for value in agreed)
        if until <= position.sequences:
            return []
        told = f"leaving out {until - position.sequences} sequences, on which the numbers went wrong ({FILE})"
        position.sequences = until
        return [told]

    def allowing(
        self, step: int, until: int, summed: torch.Tensor, units: int
    ) -> Callable[[torch.Tensor], bool] | None:
        """What to ask before the update, given the norm: None where nothing is ever skipped.

        `until`: the sequence up to which this step's data go.
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
                why = why or self._leap(float(loss) / max(1, units), units)
            if why:
                self._why[step] = why
                self._note(step, why, "skip", until)
                if failure := self._count(f"{why} at step {step}"):
                    raise failure
            return not why

        return allowed

    def look(self, records: list[dict[str, Any]], position: Position) -> RunFailed | None:
        """Marks the steps that were skipped, and says what to end this start with, if anything."""
        settings, fine = self._settings, []
        for record in records:
            if why := self._why.pop(record["step"], ""):
                record |= {"skipped": True, "why": why}
            else:
                fine.append(record)
        if trouble := not_finite(fine, self._scaled):
            return self._end(settings.nan, trouble, position)
        if settings.spike is None or settings.on_spike == "skip":
            return None
        leaps = (
            f"{why} at step {r['step']}"
            for r in fine
            if (why := self._leap(r["loss"], r["supervised_tokens"]))
        )
        if why := next(leaps, ""):
            remedy = "\n  → lower train.learning_rate, or let it go back: guard.on_spike: back"
            return self._end(settings.on_spike, why + remedy, position)
        return None

    def compare(self, tensors: Callable[[], dict[str, Any]], step: int) -> RunFailed | None:
        """Where it is time to: whether replicas are alike (checksum.py)."""
        every, mesh = self._settings.checksum, self._world.mesh["replicate"]
        if every is None or step // every == self._compared // every or mesh.size() == 1:
            return None
        before, self._compared = self._compared, step
        found = differing(tensors(), mesh.get_group(), self._world.control)
        if not found:
            return None
        return RunFailed(
            f"{found} at step {step}: its memory or its computing has failed (they were alike at step {before})\n"
            f"  → check or leave out that rank's device and host, and go on from a checkpoint of step {before} or "
            "before with resume=FOLDER"
        )

    def _leap(self, loss: float, units: int) -> str:
        """What to say of a loss far above the recent ones; others are remembered.

        A mean over fewer units scatters more: the last step of an epoch may have few.
        """
        assert self._settings.spike is not None
        if len(self._recent) >= min(FEWEST, self._settings.window):
            losses, usual = (
                [value for value, _ in self._recent],
                statistics.fmean(n for _, n in self._recent),
            )
            mean, spread = statistics.fmean(losses), statistics.pstdev(losses)
            wider = math.sqrt(max(1.0, usual / max(1, units)))
            bound = mean + self._settings.spike * max(spread, 0.01 * abs(mean)) * wider
            if loss > bound:
                return f"the loss leapt to {loss:.4g} (mean {mean:.4g} of {len(self._recent)} steps, bound {bound:.4g})"
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
            with self._file.open("a") as file:
                file.write(
                    json.dumps({"step": step, "did": did, "why": why, "until": until}) + "\n"
                )


def read_skipped(file: Path) -> list[dict[str, Any]]:
    """What was left out, oldest first; a torn last line is none."""
    found = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            found.append(dict(json.loads(line)))
        except ValueError:
            break
    return found


def _rewrite(file: Path, entries: list[dict[str, Any]]) -> None:
    if file.is_file():
        temporary = file.with_name(f".{file.name}")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        temporary.replace(file)
