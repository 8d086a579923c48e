# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Rows of bf16 weights as bytes, those of some parameters in 8 bits: what a gather of layers in fp8 sends.

[Note: packed weights] A row is what one rank has of a unit: the shards of its parameters one after the other. On the
wire come first those that stay in bf16, then the codes (e4m3) of the others in units of one scale per parameter, then
zeros up to a multiple of ALIGN bytes. The scales are no part of it: every rank knows each parameter's largest value
(parallel/zero/float8_gather.py).

[Note: rounding twice] A layer that rounds what it gets finds the same codes and the same scale that it would find in
the weights themselves. The largest value A of a bf16 tensor is a bf16 number; its code is 448, in units of A / 448,
which comes out as A again. Any other code comes out with a relative error of at most 2⁻⁸, and the nearest number that
rounds to another code is 2⁻⁵ away. TINY, below which a tensor counts as zero, is a bf16 number too. It needs both to
multiply by the same number: see [Note: one inverse] in float8.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from shardwise.core.effective_device import stands_in
from shardwise.nn.kernels.float8 import FORWARD
from shardwise.nn.kernels.transposed_round import rounded

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

ALIGN = 16  # bytes; rows lie next to each other and are read in words of this size
TILE, WARPS = 4096, 8


@dataclass(frozen=True)
class PackedSegment:
    """Elements of a row, their first byte on the wire, and the index of their scale; -1: they stay in bf16."""

    start: int
    stop: int
    byte: int
    scale: int


@dataclass(frozen=True)
class PackedRow:
    """How a row of `elements` is packed into `bytes`."""

    segments: tuple[PackedSegment, ...]
    elements: int
    bytes: int


def lay_out(parts: Sequence[tuple[int, int]]) -> PackedRow:
    """Returns the layout of a row whose parts have these sizes and scale indices (-1: none)."""
    bf16_bytes = 2 * sum(size for size, scale in parts if scale < 0)
    element = 0
    byte16 = 0
    byte8 = bf16_bytes
    segments = []
    for size, scale in parts:
        segments.append(PackedSegment(element, element + size, byte16 if scale < 0 else byte8, scale))
        element += size
        if scale < 0:
            byte16 += 2 * size
        else:
            byte8 += size
    return PackedRow(tuple(s for s in segments if s.start < s.stop), element, byte8 + -byte8 % ALIGN)


def pack(x: torch.Tensor, row: PackedRow, inverse: torch.Tensor) -> torch.Tensor:
    """Packs a flat row of bf16 into bytes; `inverse` has the factor of each parameter that is coded."""
    assert x.shape == (row.elements,) and x.dtype == torch.bfloat16 and x.is_contiguous()
    out = torch.empty(row.bytes, dtype=torch.uint8, device=x.device)
    if stands_in():
        return out.zero_()
    used = max((s.byte + (s.stop - s.start) * (2 if s.scale < 0 else 1) for s in row.segments), default=0)
    out[used:].zero_()
    if _takes(x):
        _pack[_grid(row, 1)](x, out, inverse, _tiles(row, x.device), torch.finfo(FORWARD).max, _aligned(row), TILE,
                             num_warps=WARPS)  # fmt: skip
        return out
    for s in row.segments:
        part = x[s.start : s.stop]
        bytes_ = part if s.scale < 0 else rounded(part, inverse[s.scale], FORWARD)
        out[s.byte : s.byte + bytes_.nbytes].copy_(bytes_.view(torch.uint8))
    return out


def unpack_into(out: torch.Tensor, packed: torch.Tensor, row: PackedRow, scales: torch.Tensor) -> None:
    """Unpacks (…, bytes) into the bf16 of `out` (…, elements), which must be contiguous along elements only."""
    assert out.shape[-1] == row.elements and packed.shape[-1] == row.bytes and out.dtype == torch.bfloat16
    if stands_in():
        out.zero_()
        return
    if _takes(out):
        target = _three(out)
        source = _three(packed)
        aligned = _aligned(row) and not any(stride % ALIGN for stride in target.stride()[:2])
        _unpack[_grid(row, target.shape[0] * target.shape[1])](
            target, source, scales, _tiles(row, out.device), target.shape[1], target.stride(0), target.stride(1),
            source.stride(0), source.stride(1), aligned, TILE, num_warps=WARPS,
        )  # fmt: skip
        return
    for s in row.segments:
        size = s.stop - s.start
        target = out[..., s.start : s.stop]
        if s.scale < 0:
            target.copy_(packed[..., s.byte : s.byte + 2 * size].view(torch.bfloat16))
        else:
            target.copy_(packed[..., s.byte : s.byte + size].view(FORWARD).float() * scales[s.scale])


def _takes(x: torch.Tensor) -> bool:
    return x.is_cuda and triton is not None


def _three(x: torch.Tensor) -> torch.Tensor:
    assert x.stride(-1) == 1 and x.ndim <= 3, f"rows must be contiguous, not {x.stride()}"
    return x[(None,) * (3 - x.ndim)]


def _aligned(row: PackedRow) -> bool:
    """Whether all segments are aligned to words."""
    return not any(s.start % ALIGN or s.stop % ALIGN or s.byte % ALIGN for s in row.segments)


def _grid(row: PackedRow, rows: int) -> tuple[int, int]:
    return sum(-(-(s.stop - s.start) // TILE) for s in row.segments), rows


@cache
def _tiles(row: PackedRow, device: torch.device) -> torch.Tensor:
    """For each program: first element, end of its segment, first byte, index of the scale."""
    table = [
        (at, s.stop, s.byte + (at - s.start) * (2 if s.scale < 0 else 1), s.scale)
        for s in row.segments
        for at in range(s.start, s.stop, TILE)
    ]
    return torch.tensor(table, dtype=torch.int64, device=device)


if triton is not None:

    @triton.jit
    def _tile(tiles, ALIGNED: tl.constexpr):
        entry = tiles + tl.program_id(0) * 4
        start, stop, byte = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if ALIGNED:
            start, stop, byte = tl.multiple_of(start, 16), tl.multiple_of(stop, 16), tl.multiple_of(byte, 16)
        return start, stop, byte, tl.load(entry + 3)

    @triton.jit
    def _pack(x, out, inverse, tiles, most, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
        start, stop, byte, scale = _tile(tiles, ALIGNED)
        j = tl.arange(0, SIZE)
        value = tl.load(x + start + j, mask=start + j < stop, other=0.0)
        if scale < 0:
            tl.store((out + byte).to(tl.pointer_type(tl.bfloat16)) + j, value, mask=start + j < stop)
        else:
            wide = value.to(tl.float32) * tl.load(inverse + scale)
            code = tl.clamp(wide, -most, most, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
            tl.store(out + byte + j, code.to(tl.uint8, bitcast=True), mask=start + j < stop)

    @triton.jit
    def _unpack(
        out, packed, scales, tiles, inner, out_outer, out_inner, packed_outer, packed_inner, ALIGNED: tl.constexpr,
        SIZE: tl.constexpr,
    ):  # fmt: skip
        start, stop, byte, scale = _tile(tiles, ALIGNED)
        i, k = (tl.program_id(1) // inner).to(tl.int64), (tl.program_id(1) % inner).to(tl.int64)
        j = tl.arange(0, SIZE)
        source = packed + i * packed_outer + k * packed_inner + byte
        target = out + i * out_outer + k * out_inner + start
        if scale < 0:
            value = tl.load(source.to(tl.pointer_type(tl.bfloat16)) + j, mask=start + j < stop, other=0.0)
            tl.store(target + j, value, mask=start + j < stop)
        else:
            code = tl.load(source + j, mask=start + j < stop, other=0).to(tl.float8e4nv, bitcast=True)
            wide = code.to(tl.float32) * tl.load(scales + scale)
            tl.store(target + j, wide.to(tl.bfloat16), mask=start + j < stop)
