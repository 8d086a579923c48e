"""A run's step at its real widths but with few of its layers, rehearsed twice and scaled to all: a second or two.

See rehearse/tally.py for why this is exact where layers are alike. A pipeline is sketched as one stage's ranks without
it; `estimate.py` puts the stages together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.config.schema import Run
from shardwise.launch.cpu import usable_cores
from shardwise.models.shrink import depths_of, first_layers
from shardwise.models.source import ModelSource
from shardwise.rehearse.apart import apart_all
from shardwise.rehearse.step import rehearse
from shardwise.rehearse.tally import Tally, scaled, tally_of

MOST_PERIOD = 6  # layers after which kinds of them come round again


@dataclass(frozen=True)
class Sketched:
    """What two rehearsals of few layers said; `at` scales it."""

    tallies: tuple[Tally, ...]
    layers: int  # of the model
    width: int  # of what goes from block to block
    near: Sketched | None = None  # the same with every block's input on the device, where that of some is on the host
    far: int = 0  # of how many it is

    def at(self, layers: int | None = None) -> Tally:
        """The step of a model with so many layers; default: its own."""
        wanted = self.layers if layers is None else layers
        alike = self._alike(wanted)
        if self.near is None or wanted <= self.far:
            return alike
        none, every = replace(self.near.at(wanted), layers=0), replace(alike, layers=wanted)
        return replace(scaled(none, every, self.far), layers=wanted)

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
    some = [(run, ranks) for run, ranks in runs if run.offload.activation_blocks is not None]
    if some:
        return _partly(source, runs, documents)
    depths, whole = sketch_depths(source.config)
    calls = [(source, run, ranks, layers, whole, documents) for run, ranks in runs for layers in reversed(depths)]
    tallies = apart_all(_tally, calls, usable_cores())
    found: list[Sketched | Exception] = []
    for at in range(0, len(calls), len(depths)):
        several = tallies[at : at + len(depths)]
        wrong = next((one for one in several if isinstance(one, Exception)), None)
        plain = tuple(one for one in reversed(several) if isinstance(one, Tally))
        found.append(wrong or Sketched(plain, whole, int(source.config.get_text_config().hidden_size)))
    return found


def _partly(source: ModelSource, runs: Sequence[tuple[Run, int]], documents: int) -> list[Sketched | Exception]:
    """Where inputs of some blocks are on the host: as if of all, and as if of none, for `at` to mix."""
    every = [(_moved(run, "activation_blocks", None), ranks) for run, ranks in runs]
    none = [(_moved(run, "activations", "none"), ranks) for run, ranks in every]
    both = sketch_all(source, [*every, *none], documents)
    found: list[Sketched | Exception] = []
    for (run, _), far, near in zip(runs, both, both[len(runs) :], strict=False):
        blocks = run.offload.activation_blocks
        if blocks is not None and isinstance(far, Sketched):
            far = replace(far, near=near, far=blocks) if isinstance(near, Sketched) else near
        found.append(far)
    return found


def _moved(run: Run, name: str, value: Any) -> Run:
    return run.model_copy(update={"offload": run.offload.model_copy(update={name: value})})


def sketch_depths(config: object) -> tuple[tuple[int, ...], int]:
    """The numbers of layers to rehearse, and the model's own; all of them where they are few or of many kinds."""
    depths = depths_of(config)
    if len(depths) != 1:
        return (max(depths, default=1),), max(depths, default=1)
    whole = depths.pop()
    begin, period = _pattern(config)
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
