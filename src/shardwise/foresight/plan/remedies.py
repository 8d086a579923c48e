"""Changes to suggest where a run does not fit: each is rehearsed, with what it saves and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.config.advanced import written
from shardwise.config.paths import place
from shardwise.config.schema import Run
from shardwise.config.units import human
from shardwise.core.errors import RunFailed, UserError
from shardwise.core.hardware.specs import Cluster
from shardwise.foresight.plan.blocks import fewest_blocks
from shardwise.foresight.plan.estimate import Estimate, estimate, without_pipeline
from shardwise.foresight.plan.search import Sketches
from shardwise.foresight.plan.strategies import legal
from shardwise.foresight.rehearse.batch import PACKED
from shardwise.nn.models.source import ModelSource

SHOWN = 4
BY_ROWS = ("activations", "temporary", "logits and loss")  # kinds of memory that grow with the micro-batch
AT_ONCE, ENOUGH = 4, 2  # changes that are rehearsed together; fitting ones after which no more are looked for


@dataclass(frozen=True)
class Remedy:
    """Settings by dotted path, whether they change the training result, and the estimate with them."""

    settings: dict[str, Any]
    same: bool  # whether what is learned stays as it is
    estimate: Estimate

    def describe(self, before: Estimate) -> str:
        """Returns the settings as on the command line, what they save, and what they cost."""
        overrides = " ".join(f"{written(path)}={value}" for path, value in self.settings.items())
        saved = before.peak - self.estimate.peak
        slower = self.estimate.time.seconds / before.time.seconds - 1
        cost = f"{slower:+.0%} time per step" if abs(slower) >= 0.01 else "no slower"
        result_note = "" if self.same else ", trains something else"
        excess = "" if self.estimate.fits else f", still {human(-self.estimate.spare)} too much"
        return f"{overrides}: saves {human(saved)}, {cost}{result_note}{excess}"


def remedies(source: ModelSource, run: Run, cluster: Cluster, before: Estimate) -> list[Remedy]:
    """Returns changes that make the run fit, result-preserving ones first, by time; else those that save most."""
    seen_runs: list[Run] = []
    tried: list[tuple[dict[str, Any], bool, Run]] = []
    for settings, same in _changes(run, cluster, _micro_batches_that_fit(run, before)):
        changed = _with(run, settings)
        if changed is not None and changed not in seen_runs and legal(changed, source.config, cluster.ranks) is None:
            seen_runs.append(changed)
            tried.append((settings, same, changed))
    sketches = Sketches(source, PACKED)
    estimated: list[Remedy] = []
    while tried and sum(remedy.estimate.fits and remedy.same for remedy in estimated) < ENOUGH:
        batch = tried[:AT_ONCE]
        tried = tried[AT_ONCE:]
        sketches.make(
            [(without_pipeline(changed), cluster.ranks // changed.parallel.pipeline) for _, _, changed in batch]
        )
        for settings, same, changed in batch:
            try:
                estimated.append(Remedy(settings, same, estimate(source, changed, cluster, sketches)))
            except (RunFailed, UserError):
                continue
    fitting = [_fewest_blocks_needed(remedy, source, before, sketches) for remedy in estimated if remedy.estimate.fits]
    if fitting:
        return sorted(
            fitting, key=lambda remedy: (not remedy.same, remedy.estimate.time.seconds, len(remedy.settings))
        )[:SHOWN]
    return sorted(estimated, key=lambda remedy: remedy.estimate.peak)[:SHOWN]


def _fewest_blocks_needed(remedy: Remedy, source: ModelSource, before: Estimate, sketches: Sketches) -> Remedy:
    """If recomputing all blocks fits, recompute only as many as needed."""
    if remedy.settings != {"recompute": "full"} or before.run.recompute != "none":
        return remedy
    first_blocks, blocks = fewest_blocks(source, before, remedy.estimate, sketches)
    return (
        remedy if blocks is None else Remedy(remedy.settings | {"recompute_blocks": blocks}, remedy.same, first_blocks)
    )


def _micro_batches_that_fit(run: Run, before: Estimate) -> list[int]:
    """The two largest micro-batches that divide the present one and are likely to fit."""
    micro = int(run.train.micro_batch_size)
    limit = before.cluster.device.memory
    by_rows = sum(size for kind, size in before.memory.items() if kind in BY_ROWS)
    smaller = [n for n in range(micro - 1, 0, -1) if micro % n == 0]
    return [n for n in smaller if before.peak - by_rows * (1 - n / micro) < limit][:2] or smaller[-1:]


def _changes(run: Run, cluster: Cluster, micro_batches: list[int]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Single changes first, then combinations; each with whether the training result stays the same."""
    micro = int(run.train.micro_batch_size)
    zero = run.parallel.zero
    smaller_micro: dict[str, Any] = {"train.micro_batch_size": 1} if micro > 1 else {}
    full_recompute: dict[str, Any] = {"recompute": "full"} if run.recompute in ("none", "light") else {}
    light_recompute: dict[str, Any] = {"recompute": "light"} if run.recompute == "none" and run.compiled else {}
    shard_ranks = cluster.ranks // (run.parallel.pipeline * run.parallel.tensor)
    zero3: dict[str, Any] = {"parallel.zero": 3} if zero < 3 and shard_ranks > 1 else {}
    trains_all = run.method.type == "full"
    for micro_batch in micro_batches:
        yield {"train.micro_batch_size": micro_batch}, True
    for change in (light_recompute, full_recompute, smaller_micro, zero3):
        if change:
            yield change, True
    if zero < 2 and shard_ranks > 1:
        yield {"parallel.zero": 2}, True
    if run.loss == "plain":
        yield {"loss": "auto"}, True
    less_memory = smaller_micro | full_recompute
    for combined in (less_memory, less_memory | zero3):
        if len(combined) > 1:
            yield combined, True
    if trains_all and run.offload.optimizer == "none" and not run.parallel.uses_model_parallelism:
        optimizer_on_cpu = {"offload.optimizer": "cpu"}
        yield optimizer_on_cpu, True
        yield less_memory | zero3 | optimizer_on_cpu, True
        yield less_memory | {"parallel.zero": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}, True
    if trains_all and run.train.optimizer == "adamw":
        yield less_memory | zero3 | {"train.optimizer": "adamw8bit"}, False
    if trains_all:
        yield less_memory | {"method": "lora"}, False
    if run.method.type in ("full", "lora"):
        yield less_memory | {"method": "qlora"}, False
    if run.data.sequence_length >= 1024:
        yield less_memory | zero3 | {"data.sequence_length": run.data.sequence_length // 2}, False


def _with(run: Run, settings: dict[str, Any]) -> Run | None:
    values = run.model_dump()
    for path, value in settings.items():
        place(values, path, {"type": value} if path == "method" else value)
    try:
        return Run.model_validate(values)
    except ValueError:
        return None
