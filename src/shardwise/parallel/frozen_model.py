"""A frozen second model: a reference or a teacher.

It has the compute dtype and lies on the mesh like the trained model: divided along the same axes,
and sharded like ZeRO stage 3 over the shard axis: 2 bytes per parameter over that many ranks (4 in
fp32), and one gathered block. Checkpoints do not contain it; a resumed run loads it from its own
files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.config.axes import EXPERTS, first_of
from shardwise.config.methods import Full
from shardwise.config.schema import Fp8, Offload, Parallel, Run
from shardwise.core.dtypes import COMPUTE
from shardwise.distributed.mesh import MeshLayout, World
from shardwise.nn.models.build import build_on_meta, fill_random
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.weights import load_weights
from shardwise.parallel.parallel_context import ParallelContext
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.zero.stages import ShardedModel

AXES = ("tensor", "context", "context_kind", "pipeline", "pipeline_schedule", "virtual_stages")


@dataclass(frozen=True)
class FrozenModel:
    """A model that is only asked."""

    sharded: ShardedModel
    context: ParallelContext

    def answers(
        self,
        batches: list[Any],
        compute: Callable[[Any, Any], Any],
        absent: Callable[[Any], Any],
    ) -> list[Any]:
        """As `ParallelContext.answers`."""
        return self.context.answers(self.sharded.model, batches, compute, absent)


def build_frozen(source: ModelSource, run: Run, world: World) -> FrozenModel:
    """The frozen, sharded model, with values from its files or, without files, the run's seed."""
    model = build_on_meta(source)
    model.requires_grad_(False)
    frozen = frozen_run(run, source.config)
    if frozen.parallel.expert == 1:
        world = replace(world, expert=None, expert_shards=None)
    sharded, context = parallelize(model, frozen, world, source)
    if source.weights is not None:
        load_weights(model, source.weights)
    else:
        fill_random(model, source, run.train.seed)
    model.eval()
    return FrozenModel(sharded, context)


def frozen_run(run: Run, config: Any) -> Run:
    """A run's settings for a model that is not trained: its axes, ZeRO stage 3, no other feature.

    A dense model beside one with experts has none to divide.
    """
    axes = {axis: getattr(run.parallel, axis) for axis in AXES}
    if first_of(config.get_text_config(decoder=True), EXPERTS):
        axes["expert"] = run.parallel.expert
    parallel = Parallel(zero=3, dp_shard_size=run.parallel.dp_shard_size)
    return run.model_copy(
        update={
            "parallel": parallel.model_copy(update=axes),
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


def frozen_bytes(parameters: int, layout: MeshLayout, precision: str) -> float:
    """Bytes of a frozen model on each rank, about: what all ranks have of it is not counted."""
    pieces = layout.shard * layout.tensor * layout.pipeline
    return parameters * COMPUTE[precision].itemsize / pieces
