"""What to change where a run does not fit: each change rehearsed, with what it saves and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    """Settings by dotted path, what is said of them, and the estimate with them."""

    settings: dict[str, Any]
    same: bool  # whether what is learned stays as it is
    found: Estimate

    def told(self, before: Estimate) -> str:
        """The settings as on the command line, what they save, and what they cost."""
        words = " ".join(f"{path}={value}" for path, value in self.settings.items())
        saved = before.peak - self.found.peak
        slower = self.found.time.seconds / before.time.seconds - 1
        cost = f"{slower:+.0%} time per step" if abs(slower) >= 0.01 else "no slower"
        other = "" if self.same else ", trains something else"
        short = "" if self.found.fits else f", still {human(-self.found.spare)} too much"
        return f"{words}: saves {human(saved)}, {cost}{other}{short}"


def remedies(source: ModelSource, run: Run, cluster: Cluster, before: Estimate) -> list[Remedy]:
    """Changes that make it fit, those that leave the training as it is first, by time; else what saves most."""
    known: list[Run] = []
    tried: list[tuple[dict[str, Any], bool, Run]] = []
    for settings, same in _changes(run, cluster, _rows_that_fit(run, before)):
        changed = _with(run, settings)
        if changed is not None and changed not in known and legal(changed, source.config, cluster.ranks) is None:
            known.append(changed)
            tried.append((settings, same, changed))
    sketches = Sketches(source, PACKED)
    found: list[Remedy] = []
    while tried and sum(one.found.fits and one.same for one in found) < ENOUGH:
        now, tried = tried[:AT_ONCE], tried[AT_ONCE:]
        sketches.make([(without_pipeline(one), cluster.ranks // one.parallel.pipeline) for _, _, one in now])
        for settings, same, changed in now:
            try:
                found.append(Remedy(settings, same, estimate(source, changed, cluster, sketches)))
            except (RunFailed, UserError):
                continue
    fitting = [_no_more_than_needed(one, source, before, sketches) for one in found if one.found.fits]
    if fitting:
        return sorted(fitting, key=lambda one: (not one.same, one.found.time.seconds, len(one.settings)))[:SHOWN]
    return sorted(found, key=lambda one: one.found.peak)[:SHOWN]


def _no_more_than_needed(one: Remedy, source: ModelSource, before: Estimate, sketches: Sketches) -> Remedy:
    """Where recomputing all blocks fits, as few of them as do."""
    if one.settings != {"recompute": "full"} or before.run.recompute != "none":
        return one
    some, blocks = fewest_blocks(source, before, one.found, sketches)
    return one if blocks is None else Remedy(one.settings | {"recompute_blocks": blocks}, one.same, some)


def _rows_that_fit(run: Run, before: Estimate) -> list[int]:
    """The largest micro-batches that divide the present one and should leave room; two, as the first may not."""
    micro, limit = int(run.train.micro_batch_size), before.cluster.device.memory
    by_rows = sum(size for kind, size in before.memory.items() if kind in BY_ROWS)
    smaller = [n for n in range(micro - 1, 0, -1) if micro % n == 0]
    return [n for n in smaller if before.peak - by_rows * (1 - n / micro) < limit][:2] or smaller[-1:]


def _changes(run: Run, cluster: Cluster, fewer: list[int]) -> Iterator[tuple[dict[str, Any], bool]]:
    """One change at a time, then several together."""
    micro, zero = int(run.train.micro_batch_size), run.parallel.zero
    less: dict[str, Any] = {"train.micro_batch_size": 1} if micro > 1 else {}
    again: dict[str, Any] = {"recompute": "full"} if run.recompute in ("none", "light") else {}
    lightly: dict[str, Any] = {"recompute": "light"} if run.recompute == "none" and run.compiled else {}
    spread = cluster.ranks // (run.parallel.pipeline * run.parallel.tensor)
    most: dict[str, Any] = {"parallel.zero": 3} if zero < 3 and spread > 1 else {}
    plain = run.method.type == "full"
    for rows in fewer:
        yield {"train.micro_batch_size": rows}, True
    for one in (lightly, again, less, most):
        if one:
            yield one, True
    if zero < 2 and spread > 1:
        yield {"parallel.zero": 2}, True
    if run.loss == "plain":
        yield {"loss": "auto"}, True
    both = less | again
    for together in (both, both | most):
        if len(together) > 1:
            yield together, True
    if plain and run.offload.optimizer == "none" and not run.parallel.beyond_data:
        away = {"offload.optimizer": "cpu"}
        yield away, True
        yield both | most | away, True
        yield both | {"parallel.zero": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}, True
    if plain and run.train.optimizer == "adamw" and not run.parallel.beyond_data:
        yield both | most | {"train.optimizer": "adamw8bit"}, False
    if plain:
        yield both | {"method": "lora"}, False
    if run.method.type in ("full", "lora"):
        yield both | {"method": "qlora"}, False
    if run.data.sequence_length >= 1024:
        yield both | most | {"data.sequence_length": run.data.sequence_length // 2}, False


def _with(run: Run, settings: dict[str, Any]) -> Run | None:
    values = run.model_dump()
    for path, value in settings.items():
        place(values, path, {"type": value} if path == "method" else value)
    try:
        return Run.model_validate(values)
    except ValueError:
        return None
