"""A case along the pipeline axis: two stages or more, the rows as micro-batches, gradients gathered from all stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.nn.tiny.case import LossAndGradients, TinyCase, gradients_of, mean_loss, units_of
from shardwise.parallel.pipeline import Pipeline, Schedule, StageFacts, Stages, cut_model, probe

MICROS = 2


def try_pipeline(
    case: TinyCase,
    mesh: DeviceMesh,
    schedule: Schedule | None = None,
    micros: int = MICROS,
    facts: StageFacts | None = None,
) -> LossAndGradients:
    """The loss and the gradients of a case as a pipeline over a mesh of one axis computes them."""
    schedule = schedule or Schedule("1f1b")
    group, ranks = mesh.get_group(), mesh.size()
    model = case.model()
    cut = cut_model(model, facts or probe(case), ranks * schedule.chunks)
    stages = Stages(model, cut, mesh.get_local_rank(), ranks, schedule)
    pipeline = Pipeline(stages, group, schedule, torch.device("cpu"))
    results = pipeline.step(micro_batches_of(case, micros), compute, lambda loss: loss)
    stages.sum_shared_gradients()
    return gathered(stages, results, group)


def micro_batches_of(case: TinyCase, micros: int) -> list[dict[str, Any]]:
    """The rows of a case, divided; each knows the labels of all."""
    labels = case.labels()
    parts = {
        name: value.tensor_split(micros)
        for name, value in (case.inputs() | {"labels": labels}).items()
    }
    return [
        {name: values[i] for name, values in parts.items()} | {"units": units_of(labels)}
        for i in range(micros)
    ]


def compute(model: Any, micro: dict[str, Any]) -> torch.Tensor:
    """A micro-batch's part of the mean loss."""
    inputs = {name: value for name, value in micro.items() if name not in ("labels", "units")}
    return mean_loss(model(**inputs, use_cache=False).logits, micro["labels"], micro["units"])


def gathered(
    stages: Stages, results: list[torch.Tensor], group: dist.ProcessGroup
) -> LossAndGradients:
    """The answer of the whole pipeline, on every rank."""
    mine = {
        n: g for n, g in gradients_of(stages.model).items() if stages.owners[n][0] == stages.rank
    }
    told = (sum(result.item() for result in results), mine)
    parts: list[Any] = [None] * stages.ranks
    dist.all_gather_object(parts, told, group=group)
    return LossAndGradients(
        sum(loss for loss, _ in parts),
        {n: g for _, gradients in parts for n, g in gradients.items()},
    )
