"""A backward in two parts, so that the weights' part can be deferred (zero-bubble schedules).

torch's functions start the weights' part from the graph nodes where the paths from a weight and
from an input meet. What depends on weights alone (T5's position bias, an embedding lookup between
encoder and decoder) meets no input, and they omit it silently: here its backward is an ordinary
one, run together with the weights' part.

[Note: FSDP and split backwards] FSDP processes a block's gradients once those of its inputs exist,
which is before the weights' gradients do. Where it frees parameters between forward and backward,
the weights in the graph are not those of `parameters()`. Both lose gradients silently. Parameters
must therefore stay gathered (ZeRO 0 to 2), and gradients that arrived after FSDP's own processing
are reduced after the last part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from shardwise.core.compat.torch_private import (
    finish_backward,
    is_recomputed,
    is_view,
    parameter_groups,
    stage_backward_input,
    stage_backward_weight,
)
from shardwise.nn.tiny.case import CannotParallelize


@dataclass
class DeferredBackward:
    """The weights' part of a backward.

    `groups`: torch's parameter groups. `outputs`: those that need an ordinary backward.
    """

    groups: list[Any]
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor] | None


def check_split(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Rejects models whose weights would lose gradients; see [Note: FSDP and split backwards]."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        if any(group.post_forward_mesh_info is not None for group in parameter_groups(unit)):
            raise CannotParallelize(
                "",
                "zbv needs the parameters between the parts of a backward: choose ZeRO 2 or less",
            )
    for name, block in blocks if units else ():
        if is_recomputed(block):
            raise CannotParallelize(
                name,
                "zbv would recompute each sharded block twice: "
                "choose another schedule, or no recompute",
            )


def finish_split(model: nn.Module) -> None:
    """Has FSDP reduce the gradients, after the last part and the loop's request to reduce them."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(True)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for group in parameter_groups(unit):
                group.post_backward()
    finish_backward(model)


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
) -> DeferredBackward:
    """Computes the inputs' gradients, and returns the rest for `backward_of_weights`."""
    leaves = {get_gradient_edge(x).node for x in inputs if x.requires_grad}
    split: list[torch.Tensor] = []
    split_gradients: list[torch.Tensor] = []
    rest: list[torch.Tensor] = []
    rest_gradients: list[torch.Tensor] = []
    for i, output in enumerate(outputs):
        reaches = _reaches(output, leaves)
        if reaches and is_view(output):
            output = output.clone()  # torch detaches outputs in place, which views do not take
        (split if reaches else rest).append(output)
        if gradients is not None:
            (split_gradients if reaches else rest_gradients).append(gradients[i])
    deferred = DeferredBackward([], rest, None if gradients is None else rest_gradients)
    if split:
        given = None if gradients is None else split_gradients
        deferred.groups = stage_backward_input(split, given, list(inputs), iter(weights))[1]
    return deferred


def backward_of_weights(weights: Sequence[nn.Parameter], deferred: DeferredBackward) -> None:
    """Adds the weights' gradients to those that exist."""
    # Parts of the graph that several weights share are needed for each; the graph is freed with
    # the last reference to it.
    stage_backward_weight(iter(weights), deferred.groups, retain_graph=True)
    if deferred.outputs and deferred.outputs[0].requires_grad:
        torch.autograd.backward(deferred.outputs, deferred.gradients)


def _reaches(output: torch.Tensor, leaves: set[Any]) -> bool:
    """Whether a tensor was computed from one of the leaves."""
    seen = set()
    pending: list[Any] = [output.grad_fn]
    while pending:
        node = pending.pop()
        if node in leaves:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            pending += [before for before, _ in node.next_functions]
    return False
