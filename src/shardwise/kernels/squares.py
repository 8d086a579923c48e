# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Norms of many tensors of 16 bits, added up in fp32 and always in the same order.

torch's `_foreach_norm` reads 8 billion bf16 gradients on an H200 in 6.8 ms; memory alone takes 3.4.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

BLOCK, STEPS, WARPS = 4096, 4, 8


def norm_of_all(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all tensors taken together."""
    plain = [t for t in tensors if not _takes(t)]
    parts = list(torch._foreach_norm(plain, 2, torch.float32)) if plain else []
    squares = [torch.stack(parts).square()] if parts else []
    taken = [t for t in tensors if _takes(t)]
    if taken:
        counts = [triton.cdiv(t.numel(), BLOCK * STEPS) for t in taken]
        sums = torch.empty(sum(counts), dtype=torch.float32, device=taken[0].device)
        with torch.cuda.device(sums.device):
            for tensor, part in zip(taken, sums.split(counts), strict=True):
                _squares[(len(part),)](part, tensor, tensor.numel(), BLOCK, STEPS, num_warps=WARPS)
        squares.append(sums)
    return torch.cat(squares).sum().sqrt()


def _takes(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and triton is not None and tensor.is_contiguous() and tensor.numel() > 0


if triton is not None:

    @triton.jit
    def _squares(sums, tensor, count, BLOCK: tl.constexpr, STEPS: tl.constexpr):
        start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for step in tl.static_range(STEPS):
            at = start + step * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(tensor + at, mask=at < count, other=0.0).to(tl.float32)
            total += value * value
        tl.store(sums + tl.program_id(0), tl.sum(total, 0))
