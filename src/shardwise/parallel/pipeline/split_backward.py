"""A backward in two parts, so that the weights' can wait until there is nothing else to do (zero-bubble schedules).

torch's functions find the weights' gradients from the nodes of the graph where the ways from a weight and from an input
meet. What is made from weights alone (T5's position bias, an embedding that is looked up between encoder and decoder)
meets no input, and they leave it out in silence: here its backward is a plain one, done with the weights.

[Note: FSDP and split backwards] FSDP takes up a block's gradients when those of its inputs are there, which is before
the weights' are; and where it frees parameters between forward and backward, the weights that the graph knows are not
those of `parameters()`. Both lose gradients in silence. So parameters must stay gathered (ZeRO 0 to 2), and what has
come in since FSDP last looked is taken up after the last part.
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
    parameter_groups,
    stage_backward_input,
    stage_backward_weight,
)
from shardwise.nn.tiny.case import CannotParallelize


@dataclass
class Kept:
    """What is left to do for the weights: torch's own notes, and whole backwards."""

    groups: list[Any]
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor] | None


def check_split(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuses where the weights' part would be lost; see [Note: FSDP and split backwards]."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if any(
        group.post_forward_mesh_info is not None
        for unit in sharded
        for group in parameter_groups(unit)
    ):
        raise CannotParallelize(
            "", "zbv needs the parameters between the parts of a backward: choose ZeRO 2 or less"
        )
    if sharded and (again := next((name for name, block in blocks if is_recomputed(block)), "")):
        raise CannotParallelize(
            again,
            "zbv would recompute each sharded block twice: choose another schedule, or no recompute",
        )


def finish_split(model: nn.Module) -> None:
    """After the last part, and after the loop has asked for its gradients to be reduced: has FSDP reduce them."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(True)
        for unit in model.modules():
            for group in parameter_groups(unit) if isinstance(unit, FSDPModule) else []:
                group.post_backward()
        finish_backward(model)


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
) -> Kept:
    """Gradients of the inputs alone; what is returned is for `backward_of_weights`."""
    leaves = {get_gradient_edge(one).node for one in inputs if one.requires_grad}
    meets = [_reaches(output, leaves) for output in outputs]
    split = [output for output, met in zip(outputs, meets, strict=True) if met]
    whole = [output for output, met in zip(outputs, meets, strict=True) if not met]
    if gradients is None:
        split_gradients = whole_gradients = None
    else:
        split_gradients = [gradient for gradient, met in zip(gradients, meets, strict=True) if met]
        whole_gradients = [
            gradient for gradient, met in zip(gradients, meets, strict=True) if not met
        ]
    groups = (
        stage_backward_input(split, split_gradients, list(inputs), iter(weights))[1]
        if split
        else []
    )
    return Kept(groups, whole, whole_gradients)


def backward_of_weights(weights: Sequence[nn.Parameter], kept: Kept) -> None:
    """Gradients of the weights, added to those that are there."""
    # What several weights' ways have in common is needed for each; all of it goes when nothing refers to it.
    stage_backward_weight(iter(weights), kept.groups, retain_graph=True)
    if kept.outputs and kept.outputs[0].requires_grad:
        torch.autograd.backward(kept.outputs, kept.gradients)


def _reaches(output: torch.Tensor, leaves: set[Any]) -> bool:
    """Whether a tensor was made from one of the leaves."""
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node in leaves:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return False
