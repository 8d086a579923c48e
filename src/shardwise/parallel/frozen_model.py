"""A second model beside the one that is trained: a reference or a teacher, never changed.

It is in the compute type and divided like stage 3 over the mesh's shard axis, so it costs 2 bytes per parameter over
that many ranks (4 in fp32) and one block at a time besides. It is no part of checkpoints: whatever was resumed, it
comes from its own files.
"""

from __future__ import annotations

from shardwise.core.dtypes import COMPUTE
from shardwise.distributed.mesh import World
from shardwise.nn.models.build import build_on_meta, fill_random, find_blocks, materialise, store_in
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.weights import load_weights
from shardwise.parallel.zero.stages import ShardedModel, shard_model


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
