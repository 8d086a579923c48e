"""A second model beside the one that is trained: a reference or a teacher, never changed.

It is in the compute type and divided like stage 3 over the mesh's shard axis, so it costs 2 bytes per parameter over
that many ranks (4 in fp32) and one block at a time besides. It is no part of checkpoints: whatever was resumed, it
comes from its own files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.models.build import build_on_meta, fill_random, find_blocks, materialise
from shardwise.models.source import ModelSource, converted_folder
from shardwise.models.weights import check_shapes, load_weights, match_names, tensor_files
from shardwise.parallel.mesh import World
from shardwise.zero.policy import store_in
from shardwise.zero.stages import COMPUTE, ShardedModel, shard_model


def readable(source: ModelSource, model: Any, say: Callable[[str], None] = lambda _: None) -> ModelSource:
    """The source with files whose tensors are named and shaped as the model's are; converted once if need be."""
    if source.weights is None:
        return source
    folder = source.weights
    if match_names(model, tensor_files(folder)) is None:
        say("converting the weights to the model's own names (once)")
        folder = converted_folder(source)
    check_shapes(model, folder)
    return replace(source, weights=folder)


def build_frozen(source: ModelSource, world: World, precision: str, seed: int) -> ShardedModel:
    """The model with its first values (the seed's, where it has no files), ready for forwards without gradients."""
    model = build_on_meta(source)
    model.requires_grad_(False)
    store_in(model, COMPUTE[precision])
    shard_model(model, find_blocks(model), world.mesh, 3, precision)
    materialise(model, world.device)
    if source.weights is not None:
        load_weights(model, source.weights)
    else:
        fill_random(model, source, seed)
    model.eval()
    return ShardedModel(model, 3, world.mesh)


def frozen_bytes(parameters: int, shard: int, precision: str) -> float:
    """What it takes on each rank."""
    return parameters * COMPUTE[precision].itemsize / shard
