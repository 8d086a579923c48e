"""Finds the least recomputation that still fits: `light`, or full recomputation of the first N blocks."""

from __future__ import annotations

import math

from shardwise.foresight.plan.estimate import MARGIN, Estimate, Sketcher, estimate
from shardwise.foresight.plan.sketch import sketch
from shardwise.nn.models.source import ModelSource


def fewest_recomputed(source: ModelSource, all_blocks: Estimate) -> tuple[Estimate, int | None]:
    """Returns an estimate that recomputes as few blocks as still fit, and their number.

    `all_blocks` is the estimate with every block recomputed. The number is None for all blocks, and for `recompute:
    light`.
    """
    run = all_blocks.run
    cluster = all_blocks.cluster
    if run.compiled and run.offload.activations == "none":
        lightly = estimate(source, run.model_copy(update={"recompute": "light"}), cluster)
        if lightly.fits:
            return lightly, None
    if not _can_recompute_some(source, all_blocks):
        return all_blocks, None
    return fewest_blocks(source, estimate(source, run.model_copy(update={"recompute": "none"}), cluster), all_blocks)


def fewest_blocks(
    source: ModelSource, no_blocks: Estimate, all_blocks: Estimate, sketcher: Sketcher = sketch
) -> tuple[Estimate, int | None]:
    """Returns the estimate and the number of blocks to recompute, between none (too large) and all (fits).

    Memory grows evenly from all to none (foresight/plan/sketch.py), so that the two say where the line is.
    """
    layers = _layers(source)
    cluster = all_blocks.cluster
    excess = no_blocks.peak * (1 + MARGIN) - cluster.device.memory
    saving = (no_blocks.peak - all_blocks.peak) * (1 + MARGIN)
    if saving <= 0 or not _can_recompute_some(source, all_blocks):
        return all_blocks, None
    blocks = max(1, math.ceil(layers * excess / saving))
    while blocks < layers:
        first_blocks = estimate(
            source, all_blocks.run.model_copy(update={"recompute_blocks": blocks}), cluster, sketcher
        )
        if first_blocks.fits:
            return first_blocks, blocks
        blocks += 1
    return all_blocks, None


def _can_recompute_some(source: ModelSource, all_blocks: Estimate) -> bool:
    """Whether recomputing only some of the blocks is supported."""
    run = all_blocks.run
    all_or_none = run.parallel.pipeline > 1 or run.offload.activations != "none" or source.config.is_encoder_decoder
    return not all_or_none and _layers(source) > 1


def _layers(source: ModelSource) -> int:
    return int(getattr(source.config.get_text_config(), "num_hidden_layers", 0))
