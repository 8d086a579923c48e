"""A rank's experts of a stack that is sharded over ranks, on plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def sum_of_own_experts(
    module: Any,
    forward: Callable[..., Any],
    first: int,
    count: int,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """What a rank's experts, `count` from `first` on, add to the outputs of all `tokens`."""
    is_local = (chosen >= first) & (chosen < first + count)
    rows, places = is_local.nonzero(as_tuple=True)
    # Without a token the stack must still join the graph: other ranks wait for its gradients.
    if not len(rows):
        rows = rows.new_zeros(1)
        places = places.new_zeros(1)
    experts = (chosen[rows, places] - first).clamp(0, count - 1)
    share = shares[rows, places] * is_local[rows, places]
    with _num_experts(module, count):
        outputs = forward(tokens[rows], experts[:, None], share[:, None], *rest)
    return torch.zeros_like(tokens).index_add(0, rows, outputs.to(tokens.dtype))


@contextmanager
def _num_experts(module: Any, count: int) -> Iterator[None]:
    before = module.num_experts
    module.num_experts = count
    try:
        yield
    finally:
        module.num_experts = before
