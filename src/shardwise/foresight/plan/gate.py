"""Before a run starts: whether it will fit, and what to change if not. After it: what was foreseen beside what came."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.config.schema import Run
from shardwise.config.units import human
from shardwise.core.errors import RunFailed, UserError
from shardwise.core.hardware.specs import Cluster
from shardwise.foresight.plan.estimate import Estimate, estimate
from shardwise.foresight.plan.remedies import remedies
from shardwise.foresight.plan.result import estimate_dict
from shardwise.foresight.plan.sketch import sketch
from shardwise.foresight.rehearse.batch import PACKED
from shardwise.nn.models.source import ModelSource
from shardwise.observe.calibration import Correction, correction
from shardwise.observe.prediction import FILE


@dataclass(frozen=True)
class Prediction:
    """What a run will take, with the correction that past runs suggest."""

    found: Estimate
    corrected: Correction

    @property
    def peak(self) -> float:
        return self.found.peak * self.corrected.memory

    @property
    def seconds(self) -> float:
        return self.found.time.seconds * self.corrected.time

    def told(self) -> str:
        """In a line."""
        limit = self.found.cluster.device.memory
        after = f" (corrected by {self.corrected.runs} earlier runs)" if self.corrected.runs else ""
        return f"{human(self.peak)} of {human(limit)} per rank, {self.seconds:.3g} s per step{after}"


def predict(source: ModelSource, run: Run, cluster: Cluster, say: Callable[[str], None]) -> Prediction | None:
    """What a resolved run takes on a cluster; None where that is not known, and then it is said why."""
    try:
        found = estimate(source, run, cluster, partial(sketch, documents=PACKED))
    except RunFailed as error:  # no reason to refuse: the run will say what is wrong
        say(f"what it needs could not be foreseen: {str(error).strip().splitlines()[-1]}")
        return None
    return Prediction(found, correction(cluster.device.name))


def check_fits(
    source: ModelSource, run: Run, ranks: int, force: bool, smaller: bool, say: Callable[[str], None]
) -> tuple[Prediction | None, Run]:
    """Refuses a run that will not fit, with remedies; `force` lets it try.

    With `smaller`, the micro-batch was left to us: it is halved until it fits.
    """
    cluster = cluster_here(run, ranks)
    if cluster is None or (os.environ.get("RANK", "0") != "0" and not smaller):
        return None, run  # the first rank speaks for all
    made = predict(source, run, cluster, say)
    while made is not None and smaller and not made.found.fits and int(run.train.micro_batch_size) > 1:
        less = run.train.model_copy(update={"micro_batch_size": _halved(int(run.train.micro_batch_size))})
        run = run.model_copy(update={"train": less})
        made = predict(source, run, cluster, say)
    if made is None:
        return None, run
    say(f"foreseen: {made.told()}")
    if made.found.fits or force:
        if not made.found.fits:
            say("it will probably not fit; going on, as --force says")
        return made, run
    raise too_large(source, run, made)


def _halved(micro: int) -> int:
    """The next smaller divisor: a batch that it divided, it divides still."""
    return next((micro // d for d in range(2, micro + 1) if micro % d == 0), 1)


def after_shortage(words: str, source: ModelSource, run: Run, made: Prediction | None) -> str:
    """The last words of a run whose device ran full, with what to change."""
    if made is None:
        return f"{words}\n  → a smaller train.micro_batch_size, recompute=full, or a higher parallel.zero needs less"
    lines = [one.told(made.found) for one in remedies(source, run, made.found.cluster, made.found)]
    return "\n    ".join([f"{words}\n  → {lines[0]}", *lines[1:]]) if lines else words


def too_large(source: ModelSource, run: Run, made: Prediction) -> UserError:
    """The refusal, with where the memory goes and what to change."""
    found, limit = made.found, made.found.cluster.device.memory
    parts = sorted(found.memory.items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {human(size)}" for name, size in parts[:4] if size)
    if found.spare < 0:
        problem = f"will not fit: a rank needs {human(made.peak)} of {human(limit)} ({most})"
    else:
        problem = f"will not fit: a host needs {human(found.host)} of {human(found.cluster.host_memory)} of its memory"
    lines = [one.told(found) for one in remedies(source, run, found.cluster, found)]
    advice = "\n    ".join(lines) or "use more or larger devices"
    return UserError("memory", human(made.peak), problem, f"{advice}\n    or --force to try all the same")


def cluster_here(run: Run, ranks: int) -> Cluster | None:
    """This machine for the run's ranks; None where its device is not known."""
    from shardwise.core.hardware.specs import this_machine

    try:
        here = this_machine()
    except UserError:
        return None
    if run.device == "cpu":
        # Ranks on a CPU share its memory.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", run.ranks if run.ranks != "auto" else 1))
        memory = here.host_memory // max(1, local)
        return replace(here, nodes=max(1, ranks // local), per_node=local, device=replace(here.device, memory=memory))
    if here.device.kind == "cpu":
        return None
    local = int(run.ranks)
    return replace(here, nodes=max(1, ranks // local), per_node=local)


def keep(made: Prediction | None, output: Path) -> None:
    """Leaves the prediction with the run."""
    if made is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / FILE).write_text(json.dumps(_plain(made), indent=1))


def _plain(made: Prediction) -> dict[str, Any]:
    device = made.found.cluster.device
    return estimate_dict(made.found, None) | {
        "device": device.name, "kind": device.kind, "limit": device.memory,
        "foreseen_bytes": made.peak, "foreseen_seconds": made.seconds,
    }  # fmt: skip
