# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Weights in few bits, in Triton: one pass over memory each. The notes in nf4.py explain the layout.

NF4's codes are read and written as words of 8: a program takes TILE blocks, of whatever rows they are, as (TILE, 8
words, 8 codes), so that a thread has whole words and stores 16 bytes of bf16 at a time, without exchange. Scales of
scales are written by the reference: they are a 64th of the elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from shardwise.nn.kernels import nf4_reference as reference
from shardwise.nn.kernels.nf4_reference import BLOCK, LEVELS, RowFormat

TILE = 32  # blocks per program: 2,048 weights for 4 warps, two words for each thread
WORDS = BLOCK // 8  # of a block
WIDE = 1024  # int8 columns per program
WARPS = 4


@triton.jit
def _scale(row, block, blocks, mine, DOUBLE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """The fp32 scale of each block; `row` points to the words of its row."""
    tail = row + blocks * PER_BLOCK
    if DOUBLE:
        pair = tail.to(tl.pointer_type(tl.float16))
        low = tl.load(pair, mask=mine, other=0.0).to(tl.float32)
        step = tl.load(pair + 1, mask=mine, other=0.0).to(tl.float32)
        code = tl.load((tail + 1).to(tl.pointer_type(tl.uint8)) + block, mask=mine, other=0).to(tl.float32)
        return libdevice.exp2(code * step + low)  # the product is exact in fp32, so fusing it changes nothing
    else:
        return tl.load(tail.to(tl.pointer_type(tl.float32)) + block, mask=mine, other=0.0)


@triton.jit
def _dequantize(
    out, packed, levels, total, blocks, columns, row_words, out_row,
    DOUBLE: tl.constexpr, TILES: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    mine = index < total
    row, block = index // blocks, index % blocks
    source = packed + row * row_words
    scale = _scale(source, block, blocks, mine, DOUBLE, PER_BLOCK)
    w, k = tl.arange(0, PER_BLOCK), tl.arange(0, 8)
    word = tl.load((source + block * PER_BLOCK)[:, None] + w[None, :], mask=mine[:, None], other=0)
    code = (word[:, :, None] >> (4 * k)[None, None, :]) & 15
    value = tl.load(levels + code) * scale[:, None, None]
    column = (block * (8 * PER_BLOCK))[:, None, None] + (w * 8)[None, :, None] + k[None, None, :]
    target = out + (row * out_row)[:, None, None] + column
    tl.store(target, value.to(out.dtype.element_ty), mask=mine[:, None, None] & (column < columns))


@triton.jit
def _to_float8(
    out, scales, packed, levels, blocks, columns, row_words, most, TILES: tl.constexpr, PER_BLOCK: tl.constexpr
):
    """A row's blocks in units of the row's largest scale, which is that of code 255; scales of scales alone.

    Nothing is divided to find the row, and a row's two numbers are read once: that is half of the time.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * TILES + tl.arange(0, TILES)
    mine = block < blocks
    source = packed + row * row_words
    tail = source + blocks * PER_BLOCK
    pair = tail.to(tl.pointer_type(tl.float16))
    low, step = tl.load(pair).to(tl.float32), tl.load(pair + 1).to(tl.float32)
    if tl.program_id(1) == 0:
        tl.store(scales + row, libdevice.exp2(255 * step + low) / most)
    byte = tl.load((tail + 1).to(tl.pointer_type(tl.uint8)) + block, mask=mine, other=0).to(tl.float32)
    share = libdevice.exp2((byte - 255) * step) * most
    w, k = tl.arange(0, PER_BLOCK), tl.arange(0, 8)
    word = tl.load(source + (block * PER_BLOCK)[:, None] + w[None, :], mask=mine[:, None], other=0)
    code = (word[:, :, None] >> (4 * k)[None, None, :]) & 15
    value = tl.clamp(tl.load(levels + code) * share[:, None, None], -most, most)
    column = (block * (8 * PER_BLOCK))[:, None, None] + (w * 8)[None, :, None] + k[None, None, :]
    target = out + row * columns + column
    tl.store(target, value.to(out.dtype.element_ty), mask=mine[:, None, None] & (column < columns))


@triton.jit
def _largest_scales(scales, packed, rows, code_words, row_words, most, SIZE: tl.constexpr):
    row = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    pair = (packed + row * row_words + code_words).to(tl.pointer_type(tl.float16))
    low = tl.load(pair, mask=row < rows, other=0.0).to(tl.float32)
    step = tl.load(pair + 1, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(scales + row, libdevice.exp2(255 * step + low) / most, mask=row < rows)


@triton.jit
def _quantize(
    packed, scales, x, edges, total, blocks, columns, row_words, x_row,
    EDGES: tl.constexpr, TILES: tl.constexpr, PER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores codes in place and each block's fp32 scale in `scales`."""
    index = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    mine = index < total
    row, block = index // blocks, index % blocks
    w, k = tl.arange(0, PER_BLOCK), tl.arange(0, 8)
    column = (block * (8 * PER_BLOCK))[:, None, None] + (w * 8)[None, :, None] + k[None, None, :]
    inside = mine[:, None, None] & (column < columns)
    value = tl.load(x + (row * x_row)[:, None, None] + column, mask=inside, other=0.0).to(tl.float32)
    most = tl.max(tl.max(tl.abs(value), 2), 1)
    # max() passes over nan, and nan has no code: it must show in the scale.
    broken = tl.sum(tl.sum((value != value).to(tl.int32), 2), 1) > 0
    most = tl.where(broken, float("nan"), most)
    tl.store(scales + index, most, mask=mine)
    inverse = tl.where(most > 0, tl.div_rn(tl.full(most.shape, 1.0, tl.float32), most), 0.0)
    y = value * inverse[:, None, None]
    code = tl.zeros(y.shape, tl.int32)
    for i in tl.static_range(EDGES):
        code += (y > tl.load(edges + i)).to(tl.int32)
    word = tl.sum(code << (4 * k)[None, None, :], 2)  # no bit twice: adding is joining
    target = (packed + row * row_words + block * PER_BLOCK)[:, None] + w[None, :]
    tl.store(target, word, mask=mine[:, None])


@triton.jit
def _dequantize_steps(out, packed, columns, row_words, code_bytes, out_row, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    source = packed + row * row_words * 4  # a multiple of 4 that the compiler sees: codes are loaded by words
    scale = tl.load((source + code_bytes).to(tl.pointer_type(tl.float32)))
    code = tl.load(source + column, mask=column < columns, other=0).to(tl.float32)
    tl.store(out + row * out_row + column, (code * scale).to(out.dtype.element_ty), mask=column < columns)


def quantize_into(out: torch.Tensor, x: torch.Tensor, form: RowFormat) -> None:
    """Quantises (rows, columns) floats to (rows, row_bytes) int8."""
    if form.bits != "nf4" or x.stride(1) != 1:
        reference.quantize_into(out, x, form)
        return
    scales = torch.empty(len(x), form.blocks, device=x.device)
    with torch.cuda.device(x.device):
        _quantize[_grid(scales.numel())](
            out.view(torch.int32), scales, x, reference.edges(str(x.device)), scales.numel(), form.blocks,
            form.columns, form.row_bytes // 4, x.stride(0), EDGES=len(LEVELS) - 1, TILES=TILE, PER_BLOCK=WORDS,
            num_warps=WARPS,
        )  # fmt: skip
    reference.write_scales(out, scales, form)


def dequantize_into(out: torch.Tensor, packed: torch.Tensor, form: RowFormat) -> None:
    """Dequantises (rows, row_bytes) int8 to (rows, columns) floats."""
    if form.bits == "fp8":  # rarely: products take it as it is
        reference.dequantize_into(out, packed, form)
        return
    packed = packed.contiguous()
    with torch.cuda.device(out.device):
        if form.bits == "int8":
            _dequantize_steps[(len(out), triton.cdiv(form.columns, WIDE))](
                out, packed, form.columns, form.row_bytes // 4, form.code_bytes, out.stride(0), WIDTH=WIDE,
                num_warps=WARPS,
            )  # fmt: skip
            return
        total = len(out) * form.blocks
        _dequantize[_grid(total)](
            out, packed.view(torch.int32), reference.levels(str(out.device)), total, form.blocks, form.columns,
            form.row_bytes // 4, out.stride(0), DOUBLE=form.double, TILES=TILE, PER_BLOCK=WORDS, num_warps=WARPS,
        )  # fmt: skip


def as_float8(packed: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows in fp8 and their scales."""
    if form.bits != "nf4" or not form.double:
        return reference.as_float8(packed, form)
    packed = packed.contiguous()
    out = torch.empty(len(packed), form.columns, dtype=reference.FLOAT8, device=packed.device)
    scales = torch.empty(len(packed), 1, device=packed.device)
    with torch.cuda.device(packed.device):
        _to_float8[(len(packed), triton.cdiv(form.blocks, TILE))](
            out, scales, packed.view(torch.int32), reference.levels(str(packed.device)), form.blocks, form.columns,
            form.row_bytes // 4, reference.LARGEST, TILES=TILE, PER_BLOCK=WORDS, num_warps=WARPS,
        )  # fmt: skip
    return out, scales


def float8_scales(packed: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Returns the scale of each row in fp8."""
    if form.bits != "nf4" or not form.double:
        return reference.float8_scales(packed, form)
    packed = packed.contiguous()
    scales = torch.empty(len(packed), 1, device=packed.device)
    with torch.cuda.device(packed.device):
        _largest_scales[(triton.cdiv(len(packed), WIDE),)](
            scales, packed.view(torch.int32), len(packed), form.code_bytes // 4, form.row_bytes // 4,
            reference.LARGEST, SIZE=WIDE, num_warps=WARPS,
        )  # fmt: skip
    return scales


def _grid(blocks: int) -> tuple[int]:
    return (triton.cdiv(blocks, TILE),)
