# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rounds a matrix to 8 bits in both layouts: 8-bit products need their operands contiguous along the sum.

A product's backward sums over other dimensions than its forward, so both layouts of most matrices are needed. A
compiler makes them in two passes, each of which recomputes what comes before, and writes the second with strides. Here
what comes before is computed once, read once and written twice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

MULTIPLE = 16  # what 8-bit products' dimensions must be divisible by
TILE, WARPS = 64, 4


@torch.library.custom_op("shardwise::round_both", mutates_args=())
def round_both(x: torch.Tensor, inverse: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x · inverse in 8 bits as (n, m), and transposed as (m, n padded with zeros to a multiple of 16)."""
    if _takes(x):
        rows = torch.empty(x.shape, dtype=kind, device=x.device)
        return rows, _launch(x, inverse, rows, kind)
    rows = rounded(x, inverse, kind)
    return rows, lengthened(rows.t())


@round_both.register_fake
def _(x: torch.Tensor, inverse: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=kind), x.new_empty(x.shape[1], _padded(x.shape[0]), dtype=kind)


@torch.library.custom_op("shardwise::round_transposed", mutates_args=())
def round_transposed(x: torch.Tensor, inverse: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Returns x · inverse in 8 bits, transposed only."""
    return _launch(x, inverse, None, kind) if _takes(x) else lengthened(rounded(x, inverse, kind).t())


@round_transposed.register_fake
def _(x: torch.Tensor, inverse: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.new_empty(x.shape[1], _padded(x.shape[0]), dtype=kind)


def rounded(x: torch.Tensor, inverse: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Returns x · inverse in 8 bits, contiguous by rows: the plain reference."""
    largest = torch.finfo(kind).max
    return (x.float() * inverse).clamp(-largest, largest).to(kind, memory_format=torch.contiguous_format)


def lengthened(x: torch.Tensor) -> torch.Tensor:
    """Returns x contiguous, its columns padded with zeros to the multiple that the products require."""
    padding = -x.shape[1] % MULTIPLE
    return F.pad(x.contiguous().view(torch.uint8), (0, padding)).view(x.dtype) if padding else x.contiguous()


def _padded(count: int) -> int:
    return count + -count % MULTIPLE


def _takes(x: torch.Tensor) -> bool:
    return x.is_cuda and triton is not None and x.stride(1) == 1


def _launch(x: torch.Tensor, inverse: torch.Tensor, rows: torch.Tensor | None, kind: torch.dtype) -> torch.Tensor:
    count, width = x.shape
    turned = torch.empty(width, _padded(count), dtype=kind, device=x.device)
    grid = (triton.cdiv(turned.shape[1], TILE), triton.cdiv(width, TILE))
    with torch.cuda.device(x.device):
        _round[grid](
            x, inverse, turned if rows is None else rows, turned, count, width, turned.shape[1], x.stride(0),
            torch.finfo(kind).max, rows is not None, TILE, num_warps=WARPS,
        )  # fmt: skip
    return turned


if triton is not None:

    @triton.jit
    def _round(
        x, inverse, rows, turned, count, width, long, stride, most, ROWS: tl.constexpr, TILE: tl.constexpr
    ):  # fmt: skip
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
        column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
        inside = (row[:, None] < count) & (column[None, :] < width)
        value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.clamp(value * tl.load(inverse), -most, most)
        rounded = value.to(turned.dtype.element_ty)
        if ROWS:
            tl.store(rows + row[:, None] * width + column[None, :], rounded, mask=inside)
        target = turned + column[:, None] * long + row[None, :]
        tl.store(target, tl.trans(rounded), mask=(column[:, None] < width) & (row[None, :] < long))
