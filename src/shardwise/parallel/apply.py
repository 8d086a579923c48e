"""The axes beyond data, applied to a model on `meta` in one visible order: experts → pipeline → tensor → context.

What a model's parts are is asked of a tiny model of its class, which runs here in one process: nothing of the real one
is needed but its names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config.schema import Parallel
from shardwise.distributed.mesh import World
from shardwise.nn.tiny.case import CannotParallelize, TinyCase
from shardwise.parallel.context.install import install_context
from shardwise.parallel.expert.apply import spread_experts
from shardwise.parallel.parallel_context import ParallelContext
from shardwise.parallel.pipeline import Pipeline, Stages, cut_model, probe
from shardwise.parallel.pipeline.cut import sizes_of
from shardwise.parallel.pipeline.schedule import schedule_of
from shardwise.parallel.tensor.apply import divide_tensor
from shardwise.parallel.tensor.roles import find_roles

Blocks = list[tuple[str, nn.Module]]


class AxisRefused(CannotParallelize):
    """With the axis that cannot be had."""

    def __init__(self, axis: str, refusal: CannotParallelize) -> None:
        super().__init__(refusal.module, refusal.why)
        self.axis = axis


def divide(
    model: Any, blocks: Blocks, case: TinyCase, parallel: Parallel, world: World, dtype: torch.dtype | None = None
) -> tuple[ParallelContext, Blocks]:
    """The model with every axis of the settings in place, and the blocks that this rank has of it.

    `case` makes tiny models of the same class; `dtype` is what parameters are computed in, if not as they are stored.
    """
    spread = ParallelContext(world, tiny=replace(case, dtype=torch.float32).model())
    axis = "expert"
    try:
        if world.expert is not None:
            spread.experts = spread_experts(model, world.expert)
        axis = "pipeline"
        if world.pipeline is not None:
            spread.stages = stages = _stages(model, case, parallel, world.pipeline, dtype)
            blocks = stages.blocks
            if spread.experts is not None:  # others are on other stages
                mine = {n: m for n, m in spread.experts.named.items() if any(True for _ in m.parameters())}
                spread.experts = replace(spread.experts, named=mine)
        axis = "tensor"
        if world.tensor is not None:
            spread.tensor = divide_tensor(model, find_roles(case.model()), world.tensor)
        axis = "context"
        if world.context is not None:
            spread.context = install_context(model, world.context, parallel.context_kind)
    except CannotParallelize as refusal:
        raise AxisRefused(axis, refusal) from None
    if spread.stages is not None:
        spread.pipeline = _pipeline(spread.stages, parallel, world)
    return spread, blocks


def _stages(model: Any, case: TinyCase, parallel: Parallel, mesh: DeviceMesh, dtype: torch.dtype | None) -> Stages:
    schedule = schedule_of(parallel)
    cut = cut_model(model, probe(case), mesh.size() * schedule.chunks, block_weights(model))
    return Stages(model, cut, mesh.get_local_rank(), mesh.size(), schedule, dtype)


def block_weights(model: Any) -> dict[str, float]:
    """What each block costs, by its parameters. The head goes with the last block."""
    weights = sizes_of(model)
    head = model.get_output_embeddings()
    if weights and head is not None:
        weights[list(weights)[-1]] += head.weight.numel()
    return weights


def _pipeline(stages: Stages, parallel: Parallel, world: World) -> Pipeline:
    assert world.pipeline is not None
    meshes = () if world.tensor is None else (world.tensor,)
    return Pipeline(stages, world.pipeline.get_group(), schedule_of(parallel), world.device, meshes)
