"""A case divided along all axes of some settings at once, by the code that divides and trains in a run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.config.schema import Parallel
from shardwise.data.loader import MicroBatch
from shardwise.data.rows import RowBatch
from shardwise.distributed.mesh import World
from shardwise.nn.models.build import find_blocks
from shardwise.nn.objective import Loss, Objective
from shardwise.nn.tiny.case import LossAndGradients, TinyCase, gradients_of, units_of
from shardwise.objectives.causal import CausalObjective
from shardwise.objectives.head import token_loss
from shardwise.parallel.apply import divide
from shardwise.parallel.routers.hooks import RoutedObjective
from shardwise.parallel.routers.install import routers_in
from shardwise.parallel.zero.stages import ShardedModel, shard_experts, shard_model

MICRO = 2  # rows of a micro-batch


class _Rows:
    """Masked and encoder–decoder models as the trial asks them: with the ids that it gives, no others."""

    figures: tuple[str, ...] = ()
    of_tokens = True

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        self._decoder = inputs.get("decoder_input_ids")

    def __call__(self, model: Any, batch: RowBatch) -> Loss:
        """Sum over the labels."""
        given = batch.inputs
        if self._decoder is not None:
            assert batch.sources is not None
            given["decoder_input_ids"] = self._decoder[batch.sources]
        return token_loss(model(**given, use_cache=False).logits, batch.labels, None, 1)


def try_axes(case: TinyCase, parallel: Parallel, world: World) -> LossAndGradients:
    """The loss and every gradient, whole, on every rank."""
    model = case.model()
    spread, blocks = divide(model, find_blocks(model), case, parallel, world)
    if spread.experts is not None:
        shard_experts(spread.experts, world, parallel.zero, "fp32")
    shard_model(model, blocks, world.mesh, parallel.zero, "fp32")
    sharded = ShardedModel(model, parallel.zero, world.mesh)
    spread.take(sharded)
    inputs, labels = case.inputs(), case.labels()
    scale = sharded.data_parallel_size / units_of(labels)
    objective: Objective = CausalObjective(model) if case.task == "causal" else _Rows(inputs)
    group = None if world.context is None else world.context.get_group()
    if (routers := routers_in(model, case.config, case.task, *case.router, group)) is not None:
        objective = RoutedObjective(objective, routers)
        if spread.stages is not None:
            spread.stages.carried = routers
    each = MICRO if len(labels) // MICRO >= world.layout.data else 1
    starts = range(world.place.data * each, len(labels), each * world.layout.data)
    batches = [_batch(case, inputs, labels, slice(at, at + each)) for at in starts]
    if spread.pipeline is not None:
        losses = spread.learn(
            model, objective, batches, lambda loss: loss.total * scale, sharded.prepare_micro_batch
        )  # fmt: skip
    else:
        losses = []
        for index, batch in enumerate(batches):
            sharded.prepare_micro_batch(index == len(batches) - 1)
            with spread.active():
                losses.append(objective(model, spread.share(batch)))
                (losses[-1].total * scale).backward()
    total = torch.tensor([float(loss.total.detach()) for loss in losses], dtype=torch.float64).sum()
    if not spread.counts:
        total.zero_()
    dist.all_reduce(total)
    return LossAndGradients(total.item() / units_of(labels), _everyone(gradients_of(model), world))


def _batch(case: TinyCase, inputs: dict[str, torch.Tensor], labels: torch.Tensor, rows: slice) -> Any:
    ids = inputs["input_ids"][rows]
    if case.task == "causal":
        return MicroBatch(ids, labels[rows], None, None)
    return RowBatch(ids, torch.ones_like(ids), labels[rows], torch.arange(len(labels))[rows])


def _everyone(mine: dict[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    """The gradients of all pipeline stages; one that several have is the same on each."""
    if world.pipeline is None:
        return mine
    everyone: list[Any] = [None] * world.pipeline.size()
    dist.all_gather_object(everyone, mine, group=world.pipeline.get_group())
    return {name: gradient for part in everyone for name, gradient in part.items()}
