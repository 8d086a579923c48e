"""One step of a tiny model that is assembled as a run's (parallel/parallelize.py), on each rank.

For the start-up trial and the zoo.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.config.methods import Full
from shardwise.config.schema import Run
from shardwise.data.loader import MicroBatch
from shardwise.data.rows import RowBatch
from shardwise.distributed.mesh import MeshLayout, World, join_world
from shardwise.nn.adapters.apply import apply_method
from shardwise.nn.adapters.layers import is_added
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.weights import fill_local
from shardwise.nn.objective import Loss, Objective
from shardwise.nn.tiny.case import (
    Deviation,
    LossAndGradients,
    TinyCase,
    gradients_of,
    judge,
    units_of,
)
from shardwise.objectives.causal import CausalObjective
from shardwise.objectives.head import token_loss
from shardwise.parallel.parallelize import AxisRefused, parallelize
from shardwise.parallel.routers.hooks import RoutedObjective
from shardwise.parallel.tiny_reference import alone
from shardwise.train.trial.ranks import outcome_of

MICRO = 2  # rows of a micro-batch
SPREAD = 0.2  # of adapters' initial values: none is zero, so that each has a gradient


class _RowsObjective:
    """Masked and encoder–decoder models, with the decoder ids of the trial where there are any."""

    figures: tuple[str, ...] = ()
    of_tokens = True

    def __init__(self, inputs: dict[str, torch.Tensor]) -> None:
        self._decoder = inputs.get("decoder_input_ids")

    def __call__(self, model: Any, batch: RowBatch) -> Loss:
        """Returns the loss summed over the labels."""
        inputs = batch.inputs
        if self._decoder is not None:
            assert batch.sources is not None
            inputs["decoder_input_ids"] = self._decoder[batch.sources]
        return token_loss(model(**inputs, use_cache=False).logits, batch.labels, None, 1)


def try_on_rank(
    rank: int,
    folder: Path,
    case: TinyCase,
    run: Run,
    layout: MeshLayout,
    reference: Callable[[], LossAndGradients],
    timeout: float,
    see: Callable[[Any, Any], None] = lambda model, context: None,
) -> dict[str, Any]:
    """Joins the ranks that meet in `folder` and returns the outcome of the trial on this one.

    A refusal by an axis has its name. `see` gets the model and the `ParallelContext` it was
    assembled with.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(layout.ranks), "LOCAL_RANK": str(rank)}
    refused: dict[str, str] = {}

    def compare() -> Deviation:
        expected = reference()
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", f"file://{folder}/meet", limit, layout.ranks, rank)
        try:
            world = join_world("cpu", "gloo", timeout, layout)
            return judge(try_run(case, run, world, see), expected)
        except AxisRefused as refusal:
            refused["axis"] = refusal.axis
            raise

    return outcome_of(compare) | refused


def reference_of(case: TinyCase, run: Run) -> LossAndGradients:
    """Returns what one process computes, with the run's adapters on the model."""

    def add_adapters(model: Any) -> None:
        if not isinstance(run.method, Full):
            apply_method(model, run)
            fill_added(model)

    return alone(case, add_adapters)


def try_run(
    case: TinyCase,
    run: Run,
    world: World,
    see: Callable[[Any, Any], None] = lambda model, context: None,
) -> LossAndGradients:
    """Returns the loss and every full gradient of a model that is assembled as the run says.

    Collective; the result is the same on every rank.
    """
    source = ModelSource("trial", case.config, None, "", task=case.task, attention=case.attention)
    model = case.model()
    sharded, context = parallelize(model, run, world, source, materialise=lambda _, device: None)
    see(model, context)
    fill_added(model)
    inputs = case.inputs()
    labels = case.labels()
    scale = sharded.data_parallel_size / units_of(labels)
    objective: Objective = (
        CausalObjective(model) if case.task == "causal" else _RowsObjective(inputs)
    )
    if (routers := context.router_losses) is not None:
        objective = RoutedObjective(objective, routers)
    rows = MICRO if len(labels) // MICRO >= world.layout.data else 1
    starts = range(world.place.data * rows, len(labels), rows * world.layout.data)
    batches = [_batch(case, inputs, labels, slice(at, at + rows)) for at in starts]
    losses = []
    if context.pipeline is not None:
        prepare = sharded.prepare_micro_batch
        losses = context.learn(model, objective, batches, lambda loss: loss.total * scale, prepare)
    else:
        for index, batch in enumerate(batches):
            sharded.prepare_micro_batch(index == len(batches) - 1)
            with context.active():
                losses.append(objective(model, context.share(batch)))
                (losses[-1].total * scale).backward()
    total = torch.tensor([float(loss.total.detach()) for loss in losses], dtype=torch.float64).sum()
    if not context.counts:
        total.zero_()
    dist.all_reduce(total)
    gradients = _from_all_stages(gradients_of(model), world)
    return LossAndGradients(total.item() / units_of(labels), gradients)


@torch.no_grad()
def fill_added(model: nn.Module) -> None:
    """Fills adapters with values that depend on names alone: the same on any number of ranks."""
    for name, parameter in model.named_parameters():
        if is_added(name):
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            centre = 1.0 if parameter.ndim == 1 else 0.0  # factors and magnitudes
            fill_local(parameter, centre + SPREAD * noise)


def _batch(
    case: TinyCase, inputs: dict[str, torch.Tensor], labels: torch.Tensor, rows: slice
) -> Any:
    ids = inputs["input_ids"][rows]
    if case.task == "causal":
        return MicroBatch(ids, labels[rows], None, None)
    return RowBatch(ids, torch.ones_like(ids), labels[rows], torch.arange(len(labels))[rows])


def _from_all_stages(local: dict[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    """The gradients of all pipeline stages; one that several hold is the same on each."""
    if world.pipeline is None:
        return local
    by_stage: list[Any] = [None] * world.pipeline.size()
    dist.all_gather_object(by_stage, local, group=world.pipeline.get_group())
    gradients: dict[str, torch.Tensor] = {}
    for part in by_stage:
        gradients |= part
    return gradients
