"""Many small tensors in one launch: which program takes which part of which tensor, and where they lie.

An adapter has hundreds of parameters of some ten thousand elements: launched one by one they cost the host more time
than the GPU, which waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

ALIGNED = 16  # bytes; from here on a thread loads its elements at once


@functools.lru_cache(maxsize=64)
def places(counts: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """For tensors of so many elements, taken `size` at a time: a row (tensor, first element) for each program."""
    rows = [(number, start) for number, count in enumerate(counts) for start in range(0, count, size)]
    return torch.tensor(rows, dtype=torch.int64).to(device)


@functools.lru_cache(maxsize=64)
def ends(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The tensors' sizes, where programs read them."""
    return torch.tensor(counts, dtype=torch.int64).to(device)


def addresses(*columns: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Where tensors lie, a row for each and a column for each list; and whether all begin on ALIGNED bytes."""
    rows = [[tensor.data_ptr() for tensor in row] for row in zip(*columns, strict=True)]
    found = torch.tensor(rows, dtype=torch.int64, pin_memory=True)
    aligned = not any(address % ALIGNED for row in rows for address in row)
    return found.to(columns[0][0].device, non_blocking=True), aligned
