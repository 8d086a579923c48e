"""Muon over sharded parameters: orthogonalised momentum, with the work distributed over the ranks.

Orthogonalising needs the full matrix. Repeating it on every rank would be wasteful, so the matrices are distributed:
each rank of the shard group receives the rows of one matrix from all ranks (an all-to-all), orthogonalises it and sends
every rank its rows back (another). A rank holds one full matrix at a time. Matrices are sorted by size, so that those
of a round take about the same time. Each matrix of a stack (experts) is full on one rank and is not communicated.

Updates have the size that AdamW's typically have (a root mean square of 0.2), so AdamW's rates and decay carry over.
Embeddings, the output head, norms, biases and convolutions do not map activations to activations and use AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.compat.torch_private import ConvNd
from shardwise.optim.elementwise import Elementwise
from shardwise.optim.rules import RULES
from shardwise.optim.shards import Division, division_of, local_grad, local_of, new_step, zeros_beside

MOMENTUM = 0.95
# Five iterations of this quintic map singular values from 0.003 upwards to within 0.3 of 1; more gain nothing.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns approximately the nearest orthogonal matrix, over the last two dims: all singular values are near 1."""
    a, b, c = QUINTIC
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.matrix_norm(x.float(), keepdim=True).clamp_(min=1e-7).to(x.dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if tall else x
    return result


def inner_matrices(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """Returns the names of parameters that map activations to activations: matrices and stacks of them."""
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding | ConvNd)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outer.append(head)
    excluded = {id(p) for module in outer for p in module.parameters(recurse=False)}
    names = set()
    for name, p in parameters.items():
        if p.ndim in (2, 3) and min(p.shape[-2:]) > 1 and id(p) not in excluded:
            names.add(name)
    return names


class Muon(Elementwise):
    """Muon for groups with `matrix: True` (state "momentum_buffer"), AdamW with fp32 states for the others."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, RULES["adamw"], "fp32", lr, betas, eps, weight_decay)

    @torch.no_grad()
    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """One step on the parameters of a group; for matrices collective over the shard group."""
        if group.get("matrix", False):
            self._step_matrices(group, parameters)
        else:
            super().update(group, parameters)

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        by_group: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            state: dict[str, Any] = self.state[parameter]
            if not state:
                state["step"] = new_step()
                state["momentum_buffer"] = zeros_beside(parameter, parameter.shape)
            state["step"] += 1
            division = division_of(parameter)
            if parameter.ndim == 3 or division.group is None:
                if local_of(parameter).numel():
                    _apply(parameter, orthogonal(self._direction(parameter)), group)
            else:
                by_group.setdefault(division.group, []).append(parameter)
        for members in by_group.values():
            division = division_of(members[0])
            members.sort(key=lambda p: -p.numel())  # a stable sort: the same order on every rank
            for start in range(0, len(members), division.size):
                self._round(members[start : start + division.size], division, group)

    def _round(self, matrices: Sequence[Tensor], division: Division, group: dict[str, Any]) -> None:
        """Updates as many matrices as there are ranks: the i-th rank orthogonalises the i-th."""
        outgoing = [self._direction(p).reshape(-1) for p in matrices]
        own = matrices[division.rank] if division.rank < len(matrices) else None
        received_sizes = [0] * division.size
        if own is not None:
            spans = [division.rows(own.shape[0], rank) for rank in range(division.size)]
            received_sizes = [(stop - start) * own.shape[1] for start, stop in spans]
        sizes = [rows.numel() for rows in outgoing] + [0] * (division.size - len(outgoing))
        rows_sent = torch.cat(outgoing)
        full_matrix = rows_sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(full_matrix, rows_sent, received_sizes, sizes, group=division.group)
        if own is not None:
            full_matrix = orthogonal(full_matrix.view(own.shape)).reshape(-1)
        dist.all_to_all_single(rows_sent, full_matrix, sizes, received_sizes, group=division.group)
        for parameter, rows in zip(matrices, rows_sent.split(sizes), strict=False):
            _apply(parameter, rows.view(local_of(parameter).shape), group)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Advances the momentum; returns the Nesterov gradient in the dtype of the computation."""
        grad = local_grad(parameter)
        buffer = local_of(self.state[parameter]["momentum_buffer"])
        buffer.lerp_(grad, 1 - MOMENTUM)
        nesterov = grad.lerp(buffer, MOMENTUM)
        return nesterov.bfloat16() if nesterov.is_cuda else nesterov


def _apply(parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    local = local_of(parameter)
    rate = group["lr"]
    local.mul_(1 - rate * group["weight_decay"])
    local.add_(update, alpha=-rate * 0.2 * math.sqrt(max(parameter.shape[-2:])))
