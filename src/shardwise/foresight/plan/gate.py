"""Checks before a run starts whether it fits, and what to change if not; saves the prediction with the run."""

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
    """Predicted memory and step time of a run, with the correction from past runs on the same device."""

    estimate: Estimate
    corrected: Correction

    @property
    def peak(self) -> float:
        """Corrected peak bytes of a rank's device."""
        return self.estimate.peak * self.corrected.memory

    @property
    def seconds(self) -> float:
        """Corrected seconds of a step."""
        return self.estimate.time.seconds * self.corrected.time

    def summary(self) -> str:
        """Returns memory and step time in one line."""
        limit = self.estimate.cluster.device.memory
        after = f" (corrected by {self.corrected.runs} earlier runs)" if self.corrected.runs else ""
        return f"{human(self.peak)} of {human(limit)} per rank, {self.seconds:.3g} s per step{after}"


def predict(source: ModelSource, run: Run, cluster: Cluster, say: Callable[[str], None]) -> Prediction | None:
    """Predicts what a resolved run takes on a cluster. Returns None, and reports why, if it cannot be predicted."""
    try:
        result = estimate(source, run, cluster, partial(sketch, documents=PACKED))
    except RunFailed as error:  # no reason to refuse: the run will say what is wrong
        say(f"what it needs could not be foreseen: {str(error).strip().splitlines()[-1]}")
        return None
    return Prediction(result, correction(cluster.device.name))


def check_fits(
    source: ModelSource, run: Run, ranks: int, force: bool, smaller: bool, say: Callable[[str], None]
) -> tuple[Prediction | None, Run]:
    """Raises an error with remedies for a run predicted not to fit; with `force`, only warns.

    If `smaller`, the micro-batch size is not fixed by the user and is halved until the run fits.
    """
    cluster = cluster_here(run, ranks)
    if cluster is None or (os.environ.get("RANK", "0") != "0" and not smaller):
        return None, run  # the first rank speaks for all
    prediction = predict(source, run, cluster, say)
    while prediction is not None and smaller and not prediction.estimate.fits and int(run.train.micro_batch_size) > 1:
        train = run.train.model_copy(update={"micro_batch_size": _halved(int(run.train.micro_batch_size))})
        run = run.model_copy(update={"train": train})
        prediction = predict(source, run, cluster, say)
    if prediction is None:
        return None, run
    say(f"foreseen: {prediction.summary()}")
    if prediction.estimate.fits or force:
        if not prediction.estimate.fits:
            say("it will probably not fit; going on, as --force says")
        return prediction, run
    raise too_large(source, run, prediction)


def _halved(micro: int) -> int:
    """The next smaller divisor, which also divides every batch that `micro` divides."""
    return next((micro // d for d in range(2, micro + 1) if micro % d == 0), 1)


def after_shortage(words: str, source: ModelSource, run: Run, prediction: Prediction | None) -> str:
    """Returns the message of a run that ran out of device memory, with what to change."""
    if prediction is None:
        return f"{words}\n  → a smaller train.micro_batch_size, recompute=full, or a higher parallel.zero needs less"
    lines = [
        remedy.describe(prediction.estimate)
        for remedy in remedies(source, run, prediction.estimate.cluster, prediction.estimate)
    ]
    return "\n    ".join([f"{words}\n  → {lines[0]}", *lines[1:]]) if lines else words


def too_large(source: ModelSource, run: Run, prediction: Prediction) -> UserError:
    """Returns the error for a run that does not fit, with where the memory goes and what to change."""
    result = prediction.estimate
    limit = prediction.estimate.cluster.device.memory
    parts = sorted(result.memory.items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {human(size)}" for name, size in parts[:4] if size)
    if result.spare < 0:
        problem = f"will not fit: a rank needs {human(prediction.peak)} of {human(limit)} ({largest})"
    else:
        problem = (
            f"will not fit: a host needs {human(result.host)} of {human(result.cluster.host_memory)} of its memory"
        )
    lines = [remedy.describe(result) for remedy in remedies(source, run, result.cluster, result)]
    advice = "\n    ".join(lines) or "use more or larger devices"
    return UserError("memory", human(prediction.peak), problem, f"{advice}\n    or --force to try all the same")


def cluster_here(run: Run, ranks: int) -> Cluster | None:
    """Returns this machine as a cluster of the run's ranks; None if its device is not known."""
    from shardwise.core.hardware.specs import this_machine

    try:
        machine = this_machine()
    except UserError:
        return None
    if run.device == "cpu":
        # Ranks on a CPU share its memory.
        local = int(os.environ.get("LOCAL_WORLD_SIZE", run.ranks if run.ranks != "auto" else 1))
        memory = machine.host_memory // max(1, local)
        return replace(
            machine, nodes=max(1, ranks // local), per_node=local, device=replace(machine.device, memory=memory)
        )
    if machine.device.kind == "cpu":
        return None
    local = int(run.ranks)
    return replace(machine, nodes=max(1, ranks // local), per_node=local)


def save_prediction(prediction: Prediction | None, output: Path) -> None:
    """Writes the prediction to the run's output folder."""
    if prediction is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / FILE).write_text(json.dumps(_as_json(prediction), indent=1))


def _as_json(prediction: Prediction) -> dict[str, Any]:
    device = prediction.estimate.cluster.device
    return estimate_dict(prediction.estimate, None) | {
        "device": device.name, "kind": device.kind, "limit": device.memory,
        "foreseen_bytes": prediction.peak, "foreseen_seconds": prediction.seconds,
    }  # fmt: skip
