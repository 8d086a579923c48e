"""Expert parallelism against one process: each rank takes its share of the rows, and the experts lie on all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.nn.tiny.case import LossAndGradients, TinyCase, gradients_of, mean_loss, units_of
from shardwise.parallel.expert.apply import spread_experts


def try_expert(case: TinyCase, mesh: DeviceMesh) -> LossAndGradients:
    """What the ranks of a mesh compute together."""
    model, labels = case.model(), case.labels()
    parallel = spread_experts(model, mesh)
    place, ranks, group = mesh.get_local_rank(), mesh.size(), mesh.get_group()
    mine = {name: value.chunk(ranks)[place] for name, value in case.inputs().items()}
    logits = model(**mine, use_cache=False).logits
    loss = mean_loss(logits, labels.chunk(ranks)[place], units_of(labels))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    _add_up(model, parallel.parameters, group)
    return LossAndGradients(total.item(), gradients_of(model))


def _add_up(
    model: torch.nn.Module, spread: set[torch.nn.Parameter], group: dist.ProcessGroup
) -> None:
    """Dense gradients over the ranks, as data parallelism does; those of experts are sums already."""
    for parameter in model.parameters():
        if parameter in spread or not parameter.requires_grad:
            continue
        # Which experts a rank's tokens use decides which of its dense layers have a gradient.
        has = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(has, group=group)
        if has:
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
            dist.all_reduce(parameter.grad, group=group)
