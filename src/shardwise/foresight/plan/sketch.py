"""A run's step at its real widths but with few of its layers, rehearsed twice and scaled to all: a second or two.

See foresight/rehearse/tally.py for why this is exact where layers are alike. A pipeline is sketched as one stage's
ranks without it; `estimate.py` puts the stages together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.config.schema import Run
from shardwise.core.cpu_probe import usable_cores
from shardwise.core.effective_device import ready_compiler
from shardwise.foresight.rehearse.step import rehearse
from shardwise.foresight.rehearse.subprocess import apart_all
from shardwise.foresight.rehearse.tally import Tally, scaled, tally_of
from shardwise.nn.models.source import ModelSource
from shardwise.nn.tiny.shrink import depths_of, first_layers

Segment = dict[str, float]  # bytes by category
MOST_PERIOD = 6  # layers after which kinds of them come round again


@dataclass(frozen=True)
class Sketched:
    """What two rehearsals of few layers said; `at` scales it."""

    tallies: tuple[Tally, ...]
    layers: int  # of the model
    width: int  # of what goes from block to block
    # The same where no block is recomputed (or has its input on the host) and, in this one, so many first ones are.
    near: Sketched | None = None
    far: int = 0

    def at(self, layers: int | None = None) -> Tally:
        """The step of a model with so many layers; default: its own."""
        wanted = self.layers if layers is None else layers
        alike = self._alike(wanted)
        if self.near is None or wanted <= self.far:
            return alike
        none, every = replace(self.near.at(wanted), layers=0), replace(alike, layers=wanted)
        mixed = replace(scaled(none, every, self.far), layers=wanted)
        segments = self._mixed(wanted, mixed.segments)
        peak = max(sum(one.values()) for one in segments.values())
        return replace(mixed, segments=segments, reserved=peak + max(0.0, mixed.reserved - mixed.peak))

    def _mixed(self, wanted: int, segments: dict[str, Segment]) -> dict[str, Segment]:
        """Stretches of the step in a model whose first `far` blocks are unlike the others.

        Up to the loss and in the last block, which is one of the others, it is as if none were unlike, less what the
        first ones keep less. Where backward comes to the first ones, it is as if the others were not there.
        """
        assert self.near is not None
        none, every = self.near._alike(wanted).segments, self._alike(wanted).segments
        by_none, by_every = self.near._slopes(wanted), self._slopes(wanted)
        found = dict(segments)
        for name in segments:
            if "last block" in name or name.startswith("loss"):
                saved = {c: self.far * (by_none[name].get(c, 0.0) - by_every[name].get(c, 0.0)) for c in by_none[name]}
                found[name] = {c: max(0.0, size - saved.get(c, 0.0)) for c, size in none[name].items()}
            elif "first block" in name:
                found[name] = every[name]
            if name.startswith("backward") and "last block" in name:
                gone = (wanted - self.far) * by_every[name].get("activations", 0.0)
                at = every[name]
                found[name.replace("last", "last unlike")] = at | {"activations": at.get("activations", 0.0) - gone}
        return found

    def _slopes(self, wanted: int) -> dict[str, Segment]:
        """What a layer more adds to each stretch."""
        more, less = self._alike(wanted).segments, self._alike(wanted - 1).segments
        return {
            name: {c: size - less.get(name, {}).get(c, 0.0) for c, size in at.items()} for name, at in more.items()
        }  # fmt: skip

    def _alike(self, wanted: int) -> Tally:
        if len(self.tallies) == 1:
            only = self.tallies[0]
            return only if wanted == only.layers else replace(only, layers=wanted)
        few, more = self.tallies
        return scaled(few, more, wanted)


def sketch(source: ModelSource, run: Run, ranks: int, documents: int = 1) -> Sketched:
    """A rank's step; `run` has no pipeline. Each rehearsal has a process of its own."""
    found = sketch_all(source, [(run, ranks)], documents)[0]
    if isinstance(found, BaseException):
        raise found
    return found


def sketch_all(source: ModelSource, runs: Sequence[tuple[Run, int]], documents: int = 1) -> list[Sketched | Exception]:
    """Sketches of several runs (with their ranks), as many at once as there are cores; or what went wrong."""
    depths, whole = sketch_depths(source.config, math.lcm(*(run.recompute_group for run, _ in runs)))
    if len(depths) > 1 and any(_some_blocks(run) is not None for run, _ in runs):
        return _partly(source, runs, documents)
    calls = [(source, run, ranks, layers, whole, documents) for run, ranks in runs for layers in reversed(depths)]
    if len(calls) > 1 and any(run.compiled for run, _ in runs):
        ready_compiler()
    tallies = apart_all(_tally, calls, usable_cores())
    found: list[Sketched | Exception] = []
    for at in range(0, len(calls), len(depths)):
        several = tallies[at : at + len(depths)]
        wrong = next((one for one in several if isinstance(one, Exception)), None)
        plain = tuple(one for one in reversed(several) if isinstance(one, Tally))
        found.append(wrong or Sketched(plain, whole, int(source.config.get_text_config().hidden_size)))
    return found


def _partly(source: ModelSource, runs: Sequence[tuple[Run, int]], documents: int) -> list[Sketched | Exception]:
    """Where some blocks are treated unlike the others: as if all were, and as if none were, for `at` to mix."""
    every = [(_with_blocks(run, True), ranks) for run, ranks in runs]
    none = [(_with_blocks(run, False), ranks) for run, ranks in runs]
    both = sketch_all(source, [*every, *none], documents)
    found: list[Sketched | Exception] = []
    for (run, _), far, near in zip(runs, both, both[len(runs) :], strict=False):
        blocks = _some_blocks(run)
        if blocks is not None and isinstance(far, Sketched):
            far = replace(far, near=near, far=blocks) if isinstance(near, Sketched) else near
        found.append(far)
    return found


def _some_blocks(run: Run) -> int | None:
    return run.recompute_blocks if run.recompute_blocks is not None else run.offload.activation_blocks


def _with_blocks(run: Run, every: bool) -> Run:
    """With all blocks recomputed (or with all inputs on the host), or with none."""
    offload: dict[str, Any] = {"activation_blocks": None}
    changes: dict[str, Any] = {"recompute_blocks": None}
    if not every:
        offload["activations"] = "none"
        changes |= {"recompute": "none"} if run.recompute_blocks is not None else {}
    return run.model_copy(update=changes | {"offload": run.offload.model_copy(update=offload)})


def sketch_depths(config: object, group: int = 1) -> tuple[tuple[int, ...], int]:
    """The numbers of layers to rehearse, and the model's own; all of them where they are few or of many kinds.

    `group`: blocks that are recomputed together count as one kind.
    """
    depths = depths_of(config)
    if len(depths) != 1:
        return (max(depths, default=1),), max(depths, default=1)
    whole = depths.pop()
    begin, period = _pattern(config)
    period = math.lcm(period, group)
    few = begin + max(2, period)
    if period > MOST_PERIOD or few + period >= whole:
        return (whole,), whole
    return (few, few + period), whole


def _pattern(config: object) -> tuple[int, int]:
    """Layers at the start that are unlike the rest, and after how many the rest repeats."""
    text = config.get_text_config()  # type: ignore[attr-defined]
    begin = int(getattr(text, "first_k_dense_replace", 0) or 0)
    kinds = list(getattr(text, "layer_types", None) or [])[begin:]
    period = next((p for p in range(1, len(kinds)) if kinds[p:] == kinds[:-p]), 1)
    every = [int(getattr(text, name, 1) or 1) for name in ("decoder_sparse_step", "interleave_moe_layer_step")]
    return begin, max(period, *every)


def _tally(source: ModelSource, run: Run, ranks: int, layers: int, whole: int, documents: int) -> Tally:
    small = source if layers == whole else replace(source, config=first_layers(source.config, layers))
    per_rank = run.train.batch_size // max(1, ranks // (run.parallel.tensor * run.parallel.context))
    micro = min(2, max(1, per_rank // int(run.train.micro_batch_size)))
    return tally_of(rehearse(small, run, 0, ranks, micro_batches=micro, documents=documents), layers)
