"""Many small tensors in one launch: which program takes which part of which tensor, and their addresses.

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
    """Returns a row (tensor, first element) per program, for tensors of `counts` elements taken `size` at a time."""
    rows = [(number, start) for number, count in enumerate(counts) for start in range(0, count, size)]
    return torch.tensor(rows, dtype=torch.int64).to(device)


@functools.lru_cache(maxsize=64)
def ends(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns the tensors' sizes on the device, where programs read them."""
    return torch.tensor(counts, dtype=torch.int64).to(device)


def addresses(*columns: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """Returns the tensors' addresses, a row for each and a column for each list; and whether all are ALIGNED."""
    rows = [[tensor.data_ptr() for tensor in row] for row in zip(*columns, strict=True)]
    pointers = torch.tensor(rows, dtype=torch.int64, pin_memory=True)
    aligned = not any(address % ALIGNED for row in rows for address in row)
    return pointers.to(columns[0][0].device, non_blocking=True), aligned
