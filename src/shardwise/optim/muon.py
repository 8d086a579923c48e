"""Muon over sharded parameters: orthogonalised momentum, with the work distributed over the ranks.

Orthogonalising needs the full matrix. Repeating it on every rank would be wasteful, so the matrices are distributed:
each rank of the shard group receives the parts of one matrix from all ranks (an all-to-all), orthogonalises it and
sends every rank its part back (another). Where tensor parallelism shards matrices too, its groups do the same around
that. A rank holds one full matrix at a time. Matrices are sorted by size, so that those of a round take about the same
time. Each matrix of a stack (experts) stands alone: it is communicated only if it is sharded itself.

Updates have the size that AdamW's typically have (a root mean square of 0.2), so AdamW's rates and decay carry over.
Embeddings, the output head, norms, biases and convolutions do not map activations to activations and use AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.core.compat.torch_private import ConvNd
from shardwise.optim.elementwise import Elementwise
from shardwise.optim.rules import RULES
from shardwise.optim.shards import Cut, cuts_of, local_grad, local_of, new_step, zeros_beside

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
        """One step on the parameters of a group; for matrices collective over the groups that shard them."""
        if group.get("matrix", False):
            self._step_matrices(group, parameters)
        else:
            super().update(group, parameters)

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        alike: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            state: dict[str, Any] = self.state[parameter]
            if not state:
                state["step"] = new_step()
                state["momentum_buffer"] = zeros_beside(parameter, parameter.shape)
            state["step"] += 1
            cuts = _cuts_within(parameter)
            if cuts:
                alike.setdefault((cuts, parameter.ndim), []).append(parameter)
            elif local_of(parameter).numel():
                _apply(parameter, orthogonal(self._direction(parameter)), group)
        for (cuts, ndim), members in alike.items():
            members.sort(key=lambda p: -p.numel())  # a stable sort: the same order on every rank
            together = math.prod(cut.size for cut in cuts) if ndim == 2 else 1
            for start in range(0, len(members), together):
                self._round(members[start : start + together], cuts, group)

    def _round(self, parameters: Sequence[Tensor], cuts: Sequence[Cut], group: dict[str, Any]) -> None:
        """Updates as many matrices as there are ranks, or one stack: each rank orthogonalises its share."""
        parts: list[Tensor] = []
        shapes: list[tuple[int, int]] = []
        for parameter in parameters:
            direction = self._direction(parameter)
            matrices = direction[None] if parameter.ndim == 2 else direction
            parts += matrices.unbind()
            shapes += [(parameter.shape[-2], parameter.shape[-1])] * len(matrices)
        updates = iter(_orthogonal_parts(parts, shapes, cuts))
        for parameter in parameters:
            local = local_of(parameter)
            if parameter.ndim == 2:
                _apply(parameter, next(updates), group)
            elif len(local):
                _apply(parameter, torch.stack([next(updates) for _ in local]), group)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Advances the momentum; returns the Nesterov gradient in the dtype of the computation."""
        grad = local_grad(parameter)
        buffer = local_of(self.state[parameter]["momentum_buffer"])
        buffer.lerp_(grad, 1 - MOMENTUM)
        nesterov = grad.lerp(buffer, MOMENTUM)
        return nesterov.bfloat16() if nesterov.is_cuda else nesterov


def _cuts_within(parameter: Tensor) -> tuple[Cut, ...]:
    """The cuts through matrices, by a matrix's own dims: those of a stack between its matrices do not count."""
    inner = parameter.ndim - 2
    return tuple(replace(cut, dim=cut.dim - inner) for cut in cuts_of(parameter) if cut.dim >= inner)


def _orthogonal_parts(parts: Sequence[Tensor], shapes: Sequence[tuple[int, int]], cuts: Sequence[Cut]) -> list[Tensor]:
    """This rank's parts of the orthogonalised matrices, from its parts of the matrices; `shapes` are the full ones.

    Undoes the last cut: each rank of its group gets the parts of some of the matrices and goes on with those.
    """
    if not cuts or not parts:
        return [orthogonal(part) if part.numel() else part for part in parts]
    *outer, cut = cuts
    own = range(cut.rank, len(parts), cut.size)
    before = [_part_shape(shapes[i], outer) for i in own]  # of the matrices that this rank gets
    received_shapes = [_part_shape(shape, [cut], rank) for rank in range(cut.size) for shape in before]
    order = [i for rank in range(cut.size) for i in range(rank, len(parts), cut.size)]
    sent = torch.cat([parts[i].reshape(-1) for i in order])
    sent_sizes = [sum(parts[i].numel() for i in range(rank, len(parts), cut.size)) for rank in range(cut.size)]
    numels = [height * width for height, width in received_shapes]
    received_sizes = [sum(numels[rank * len(own) : (rank + 1) * len(own)]) for rank in range(cut.size)]
    received = sent.new_empty(sum(numels))
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=cut.group)
    pieces = [flat.view(shape) for flat, shape in zip(received.split(numels), received_shapes, strict=True)]
    joined = [torch.cat(pieces[number :: len(own)], dim=cut.dim) for number in range(len(own))]
    results = _orthogonal_parts(joined, [shapes[i] for i in own], outer)
    splits = [result.split([shape[cut.dim] for shape in received_shapes[number :: len(own)]], dim=cut.dim)
              for number, result in enumerate(results)]  # fmt: skip
    back = [split[rank].reshape(-1) for rank in range(cut.size) for split in splits]
    received = torch.cat(back) if back else received
    dist.all_to_all_single(sent, received, sent_sizes, received_sizes, group=cut.group)
    updates = dict(zip(order, sent.split([parts[i].numel() for i in order]), strict=True))
    return [updates[i].view(part.shape) for i, part in enumerate(parts)]


def _part_shape(shape: tuple[int, int], cuts: Sequence[Cut], rank: int | None = None) -> tuple[int, int]:
    """The shape of a rank's part of a matrix (default: this rank's)."""
    sizes = list(shape)
    for cut in cuts:
        start, stop = cut.span(sizes[cut.dim], rank)
        sizes[cut.dim] = stop - start
    return sizes[0], sizes[1]


def _apply(parameter: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    local = local_of(parameter)
    rate = group["lr"]
    local.mul_(1 - rate * group["weight_decay"])
    local.add_(update, alpha=-rate * 0.2 * math.sqrt(max(parameter.shape[-2:])))
