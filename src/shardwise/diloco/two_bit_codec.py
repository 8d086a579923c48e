"""Two bits per element: the sign, and whether it is small or large relative to the root mean square of its block.

The two magnitudes and the threshold minimise the error for normally distributed values (Lloyd–Max: 12% of the square).
That is a large error, so it is meant for senders with error feedback. A row is its blocks' codes, four elements to a
byte, and then a bf16 scale for each block.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

BLOCK = 128
SMALL, BORDER, LARGE = 0.4528, 0.9816, 1.510
_LEVELS = torch.tensor([SMALL, LARGE, -SMALL, -LARGE])
_SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


def packed_bytes(n: int) -> int:
    """Size of n packed elements in bytes, scales included."""
    return -(-n // BLOCK) * (BLOCK // 4 + 2)


def pack(values: torch.Tensor, error: torch.Tensor | None = None) -> torch.Tensor:
    """Packs an fp32 vector; `error` is added to it and then holds the rounding error. Non-finite values stay so."""
    exact = values if error is None else values + error
    n = exact.numel()
    blocks = pad(exact, (0, -n % BLOCK)).view(-1, BLOCK)
    scales = blocks.square().mean(1).sqrt().bfloat16()
    codes = (blocks.abs() > BORDER * scales.float()[:, None]).byte() + 2 * (blocks < 0).byte()
    bytes_ = (codes.view(-1, BLOCK // 4, 4) << _SHIFTS).sum(-1, dtype=torch.uint8)
    packed = torch.cat([bytes_.flatten(), scales.view(torch.uint8)])
    if error is not None:
        error.copy_(exact - unpack(packed, n))
    return packed


def unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """Unpacks n values to fp32."""
    count = -(-n // BLOCK)
    bytes_, scales = packed.split([count * (BLOCK // 4), count * 2])
    codes = (bytes_[:, None] >> _SHIFTS) & 3
    values: torch.Tensor = (
        _LEVELS[codes.view(count, BLOCK).long()] * scales.clone().view(torch.bfloat16).float()[:, None]
    )
    return values.flatten()[:n]
