"""Rehearses a run's step at its real widths with few of its layers, twice, and scales the result to all layers.

This takes a second or two. See foresight/rehearse/tally.py for why it is exact where layers are alike. A pipeline is
sketched as one stage's ranks without it; `estimate.py` puts the stages together.
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
from shardwise.foresight.rehearse.subprocess import run_all_isolated
from shardwise.foresight.rehearse.tally import Tally, scaled, tally_of
from shardwise.nn.models.source import ModelSource
from shardwise.nn.tiny.shrink import depths_of, first_layers

Segment = dict[str, float]  # bytes by category
MOST_PERIOD = 6  # layers after which kinds of them come round again


@dataclass(frozen=True)
class Sketched:
    """Result of two rehearsals of few layers; `at` scales it to any number of layers."""

    tallies: tuple[Tally, ...]
    layers: int  # of the model
    width: int  # of what goes from block to block
    # The same where no block is recomputed (or has its input on the host) and, in this one, so many first ones are.
    near: Sketched | None = None
    far: int = 0

    def at(self, layers: int | None = None) -> Tally:
        """Returns the tally of a model with this many layers; by default its own."""
        depth = self.layers if layers is None else layers
        uniform = self._uniform(depth)
        if self.near is None or depth <= self.far:
            return uniform
        no_block = replace(self.near.at(depth), layers=0)
        all_blocks = replace(uniform, layers=depth)
        mixed = replace(scaled(no_block, all_blocks, self.far), layers=depth)
        segments = self._mixed(depth, mixed.segments)
        peak = max(sum(segment.values()) for segment in segments.values())
        return replace(mixed, segments=segments, reserved=peak + max(0.0, mixed.reserved - mixed.peak))

    def _mixed(self, depth: int, segments: dict[str, Segment]) -> dict[str, Segment]:
        """Segments of the step in a model whose first `far` blocks differ from the others.

        Up to the loss and in the last block, which is one of the others, it is as if none differed, less what the first
        blocks save. Where backward reaches the first blocks, it is as if the others were not there.
        """
        assert self.near is not None
        no_block = self.near._uniform(depth).segments
        all_blocks = self._uniform(depth).segments
        no_block_slopes = self.near._slopes(depth)
        all_block_slopes = self._slopes(depth)
        mixed = dict(segments)
        for name in segments:
            if "last block" in name or name.startswith("loss"):
                saved = {
                    c: self.far * (no_block_slopes[name].get(c, 0.0) - all_block_slopes[name].get(c, 0.0))
                    for c in no_block_slopes[name]
                }
                mixed[name] = {c: max(0.0, size - saved.get(c, 0.0)) for c, size in no_block[name].items()}
            elif "first block" in name:
                mixed[name] = all_blocks[name]
            if name.startswith("backward") and "last block" in name:
                freed = (depth - self.far) * all_block_slopes[name].get("activations", 0.0)
                at = all_blocks[name]
                mixed[name.replace("last", "last unlike")] = at | {"activations": at.get("activations", 0.0) - freed}
        return mixed

    def _slopes(self, depth: int) -> dict[str, Segment]:
        """Bytes that one more layer adds to each segment."""
        deeper = self._uniform(depth).segments
        shallower = self._uniform(depth - 1).segments
        slopes: dict[str, Segment] = {}
        for name, segment in deeper.items():
            below = shallower.get(name, {})
            slopes[name] = {category: size - below.get(category, 0.0) for category, size in segment.items()}
        return slopes

    def _uniform(self, depth: int) -> Tally:
        if len(self.tallies) == 1:
            only = self.tallies[0]
            return only if depth == only.layers else replace(only, layers=depth)
        shallow, deep = self.tallies
        return scaled(shallow, deep, depth)


def sketch(source: ModelSource, run: Run, ranks: int, documents: int = 1) -> Sketched:
    """Returns the sketch of a rank's step; `run` has no pipeline. Each rehearsal runs in a process of its own."""
    result = sketch_all(source, [(run, ranks)], documents)[0]
    if isinstance(result, BaseException):
        raise result
    return result


def sketch_all(source: ModelSource, runs: Sequence[tuple[Run, int]], documents: int = 1) -> list[Sketched | Exception]:
    """Returns the sketches of several runs with their ranks, or the errors; as many at once as there are cores."""
    depths, total_layers = sketch_depths(source.config, math.lcm(*(run.recompute_group for run, _ in runs)))
    if len(depths) > 1 and any(_some_blocks(run) is not None for run, _ in runs):
        return _partly(source, runs, documents)
    calls = [
        (source, run, ranks, layers, total_layers, documents) for run, ranks in runs for layers in reversed(depths)
    ]
    if len(calls) > 1 and any(run.compiled for run, _ in runs):
        ready_compiler()
    tallies = run_all_isolated(_tally, calls, usable_cores())
    results: list[Sketched | Exception] = []
    for start in range(0, len(calls), len(depths)):
        group = tallies[start : start + len(depths)]
        failure = next((tally for tally in group if isinstance(tally, Exception)), None)
        ordered = tuple(tally for tally in reversed(group) if isinstance(tally, Tally))
        results.append(failure or Sketched(ordered, total_layers, int(source.config.get_text_config().hidden_size)))
    return results


def _partly(source: ModelSource, runs: Sequence[tuple[Run, int]], documents: int) -> list[Sketched | Exception]:
    """Where some blocks are treated differently: one sketch as if all were and one as if none were, mixed in `at`."""
    all_blocks = [(_with_blocks(run, True), ranks) for run, ranks in runs]
    no_blocks = [(_with_blocks(run, False), ranks) for run, ranks in runs]
    both = sketch_all(source, [*all_blocks, *no_blocks], documents)
    results: list[Sketched | Exception] = []
    for (run, _), with_all, with_none in zip(runs, both, both[len(runs) :], strict=False):
        blocks = _some_blocks(run)
        if blocks is not None and isinstance(with_all, Sketched):
            with_all = replace(with_all, near=with_none, far=blocks) if isinstance(with_none, Sketched) else with_none
        results.append(with_all)
    return results


def _some_blocks(run: Run) -> int | None:
    return run.recompute_blocks if run.recompute_blocks is not None else run.offload.activation_blocks


def _with_blocks(run: Run, every: bool) -> Run:
    """The run with all blocks recomputed (or their inputs on the host), or with none."""
    offload: dict[str, Any] = {"activation_blocks": None}
    changes: dict[str, Any] = {"recompute_blocks": None}
    if not every:
        offload["activations"] = "none"
        changes |= {"recompute": "none"} if run.recompute_blocks is not None else {}
    return run.model_copy(update=changes | {"offload": run.offload.model_copy(update=offload)})


def sketch_depths(config: object, group: int = 1) -> tuple[tuple[int, ...], int]:
    """Returns the numbers of layers to rehearse and the model's own; all layers if few or of many kinds.

    Blocks that are recomputed together (`group`) count as one kind.
    """
    depths = depths_of(config)
    if len(depths) != 1:
        return (max(depths, default=1),), max(depths, default=1)
    total_layers = depths.pop()
    leading, period = _pattern(config)
    period = math.lcm(period, group)
    shallow = leading + max(2, period)
    if period > MOST_PERIOD or shallow + period >= total_layers:
        return (total_layers,), total_layers
    return (shallow, shallow + period), total_layers


def _pattern(config: object) -> tuple[int, int]:
    """Number of leading layers that differ from the rest, and the period after which the rest repeats."""
    text = config.get_text_config()  # type: ignore[attr-defined]
    leading = int(getattr(text, "first_k_dense_replace", 0) or 0)
    kinds = list(getattr(text, "layer_types", None) or [])[leading:]
    period = next((p for p in range(1, len(kinds)) if kinds[p:] == kinds[:-p]), 1)
    steps = [int(getattr(text, name, 1) or 1) for name in ("decoder_sparse_step", "interleave_moe_layer_step")]
    return leading, max(period, *steps)


def _tally(source: ModelSource, run: Run, ranks: int, layers: int, total_layers: int, documents: int) -> Tally:
    shallow = source if layers == total_layers else replace(source, config=first_layers(source.config, layers))
    per_rank = run.train.batch_size // max(1, ranks // (run.parallel.tensor * run.parallel.context))
    micro = min(2, max(1, per_rank // int(run.train.micro_batch_size)))
    return tally_of(rehearse(shallow, run, 0, ranks, micro_batches=micro, documents=documents), layers)
