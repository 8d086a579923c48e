"""A sum of matrix products kept in fp32 while their factors are in 16 bits.

In plain steps each product is rounded to 16 bits, stored, and read again to be added: for a head of 128,256 × 4,096 on
an H200 7.4 ms instead of 5.8, and a gigabyte.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("shardwise::add_product", mutates_args={"total"})
def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left · right, in place; `total` is fp32 (or of the factors' type)."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    else:
        total += left @ right


@add_product_.register_fake
def _(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    return None
