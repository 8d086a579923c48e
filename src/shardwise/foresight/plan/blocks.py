"""How little recomputation is enough: lightly, or of how many blocks."""

from __future__ import annotations

import math

from shardwise.foresight.plan.estimate import MARGIN, Estimate, Sketcher, estimate
from shardwise.foresight.plan.sketch import sketch
from shardwise.nn.models.source import ModelSource


def fewest_recomputed(source: ModelSource, found: Estimate) -> tuple[Estimate, int | None]:
    """What fits with all blocks recomputed, with as few as still fit, and how many; None = all, or none but lightly."""
    run, cluster = found.run, found.cluster
    if run.compiled and run.offload.activations == "none":
        lightly = estimate(source, run.model_copy(update={"recompute": "light"}), cluster)
        if lightly.fits:
            return lightly, None
    if not _divisible(source, found):
        return found, None
    return fewest_blocks(source, estimate(source, run.model_copy(update={"recompute": "none"}), cluster), found)


def fewest_blocks(
    source: ModelSource, free: Estimate, found: Estimate, sketcher: Sketcher = sketch
) -> tuple[Estimate, int | None]:
    """Between `free`, which recomputes nothing and is too large, and `found`, which recomputes all blocks and fits.

    Memory grows evenly from all to none (foresight/plan/sketch.py), so that the two say where the line is.
    """
    layers, cluster = _layers(source), found.cluster
    need, gain = free.peak * (1 + MARGIN) - cluster.device.memory, (free.peak - found.peak) * (1 + MARGIN)
    if gain <= 0 or not _divisible(source, found):
        return found, None
    blocks = max(1, math.ceil(layers * need / gain))
    while blocks < layers:
        some = estimate(source, found.run.model_copy(update={"recompute_blocks": blocks}), cluster, sketcher)
        if some.fits:
            return some, blocks
        blocks += 1
    return found, None


def _divisible(source: ModelSource, found: Estimate) -> bool:
    """Whether some blocks alone can be recomputed."""
    run = found.run
    whole = run.parallel.pipeline > 1 or run.offload.activations != "none" or source.config.is_encoder_decoder
    return not whole and _layers(source) > 1


def _layers(source: ModelSource) -> int:
    return int(getattr(source.config.get_text_config(), "num_hidden_layers", 0))
