"""A backward in two parts, so that the weights' can wait until there is nothing else to do (zero-bubble schedules)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.parallel.trial import Refused

try:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
except ImportError:  # a private module of torch
    stage_backward_input = None  # type: ignore[assignment]


def check_split(model: nn.Module) -> None:
    """Refuses where the weights' part would be lost."""
    if stage_backward_input is None:
        raise Refused("", "this version of torch cannot split a backward: choose another schedule than zbv")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        # torch 2.13: FSDP takes up a block's gradients when those of its inputs are there, before the weights' are.
        raise Refused("", "zbv loses gradients of sharded modules: choose another schedule")


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
) -> Any:
    """Gradients of the inputs alone; what is returned is for `backward_of_weights`."""
    if not inputs:  # of the first chunk nobody wants them
        return (list(outputs), gradients)
    given = None if gradients is None else list(gradients)
    return stage_backward_input(list(outputs), given, list(inputs), iter(weights))[1]


def backward_of_weights(weights: Sequence[nn.Parameter], kept: Any) -> None:
    """Gradients of the weights, added to those that are there."""
    if isinstance(kept, tuple):
        torch.autograd.backward(*kept)
    else:
        stage_backward_weight(iter(weights), kept)
