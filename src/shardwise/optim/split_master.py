"""An fp32 master weight as two halves: the bf16 weight that the model computes with, and 16 bits of difference.

The bf16 half is the master rounded to nearest, ties to even; the low half is the difference, as a signed count of the
last fp32 bit: `bits(master) = (bits(bf16) << 16) + low`. So a master costs 2 bytes, not 4, beside the bf16 weight. The
difference is -32768 … 32768, one value more than 16 bits can represent: exact ties (one value in 65536) that were
rounded down are restored smaller by the last bit of fp32.
"""

from __future__ import annotations

import torch


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 master of a bf16 weight and its low half."""
    bits = high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(low).view(torch.float32)


def split_(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Writes a contiguous fp32 master into its two halves; the master's memory serves as scratch and is lost."""
    high.copy_(master)
    upper = high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    low.copy_(master.view(torch.int32).sub_(upper).clamp_(max=32767))
