"""A frozen second model: a reference or a teacher.

It has the compute dtype and is sharded like ZeRO stage 3 over the mesh's shard axis: 2 bytes per
parameter over that many ranks (4 in fp32), and one gathered block. Checkpoints do not contain it;
a resumed run loads it from its own files.
"""

from __future__ import annotations

from shardwise.config.methods import Full
from shardwise.config.schema import Fp8, Offload, Parallel, Run
from shardwise.core.dtypes import COMPUTE
from shardwise.distributed.mesh import World
from shardwise.nn.models.build import build_on_meta, fill_random
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.weights import load_weights
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.zero.stages import ShardedModel


def build_frozen(source: ModelSource, run: Run, world: World) -> ShardedModel:
    """The frozen, sharded model, with values from its files or, without files, the run's seed."""
    model = build_on_meta(source)
    model.requires_grad_(False)
    sharded, _ = parallelize(model, frozen_run(run), world, source)
    if source.weights is not None:
        load_weights(model, source.weights)
    else:
        fill_random(model, source, run.train.seed)
    model.eval()
    return sharded


def frozen_run(run: Run) -> Run:
    """A run's settings for a model that is not trained: ZeRO stage 3, and no other feature."""
    return run.model_copy(
        update={
            "parallel": Parallel(zero=3, dp_shard_size=run.parallel.dp_shard_size),
            "method": Full(),
            "freeze": (),
            "train": run.train.model_copy(update={"master_weights": "fp32"}),
            "recompute": "none",
            "compile": False,
            "tiled_mlp": None,
            "experts": "plain",
            "fp8": Fp8(),
            "offload": Offload(),
        }
    )


def frozen_bytes(parameters: int, shard: int, precision: str) -> float:
    """Bytes of a frozen model on each rank."""
    return parameters * COMPUTE[precision].itemsize / shard
