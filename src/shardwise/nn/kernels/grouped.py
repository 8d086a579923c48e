"""Grouped matrix products, whose group sizes only the device knows.

torch's own, as one operator of ours: a rehearsal and a compiler know its shapes for every dtype, not only bf16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.library.custom_op("shardwise::grouped_product", mutates_args=())
def grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows up to `ends[g]` by matrix g: (n, k), (groups, k, m) → (n, m). Or (k, n), (n, m) → (groups, k, m)."""
    return F.grouped_mm(left, right, offs=ends)


@grouped_product.register_fake
def _(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    groups = () if right.ndim == 3 else (len(ends),)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])
