"""Tensor parallelism of a tiny model against one process."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from shardwise.nn.tiny.case import LossAndGradients, TinyCase, gradients_of, units_of
from shardwise.objectives.head import token_losses
from shardwise.parallel.tensor.apply import divide_tensor
from shardwise.parallel.tensor.roles import find_roles


def try_tensor(case: TinyCase, mesh: DeviceMesh) -> LossAndGradients:
    """The case divided over the mesh, with sequence parallelism and a loss over the cut vocabulary."""
    roles = find_roles(case.model())
    model, labels = case.model(), case.labels()
    tensor = divide_tensor(model, roles, mesh)
    with tensor.active():
        logits = model(**tensor.inputs(case.inputs()), use_cache=False).logits
        loss = token_losses(logits.flatten(0, 1), labels.flatten()).sum() / units_of(labels)
        loss.backward()
    return LossAndGradients(loss.item(), gradients_of(model))
