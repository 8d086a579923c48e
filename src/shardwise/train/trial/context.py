"""A tiny model with its sequences divided, for the zoo and for the check before a run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.data.loader import MicroBatch
from shardwise.nn.tiny.case import LossAndGradients, TinyCase, gradients_of, mean_loss, units_of
from shardwise.parallel.context.install import Kind, install_context


def try_context(case: TinyCase, mesh: DeviceMesh, kind: Kind = "ring") -> LossAndGradients:
    """Loss and gradients of a case whose rows are divided over a mesh of one dimension."""
    model, labels = case.model(), case.labels()
    context = install_context(model, mesh, kind)
    batch = MicroBatch(case.inputs()["input_ids"], labels, None, None)
    part = context.split(batch)
    loss = mean_loss(model(**inputs_of(part)).logits, part.labels, units_of(labels))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
            dist.all_reduce(parameter.grad, group=mesh.get_group())
    return LossAndGradients(total.item(), gradients_of(model))


def inputs_of(part: MicroBatch) -> dict[str, Any]:
    """What the model's forward takes of a rank's part."""
    given = {"position_ids": part.position_ids} if part.position_ids is not None else {}
    return {
        "input_ids": part.input_ids,
        "attention_mask": part.attention_mask,
        "use_cache": False,
        **given,
    }
