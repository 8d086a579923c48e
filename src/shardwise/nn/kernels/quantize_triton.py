# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Block quantisation in Triton, one pass over memory each. The notes in quantize.py explain layout and rounding.

A program takes TILE blocks of one row as two halves of (TILE, BLOCK/2), so that int4 pairs need no shuffle.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from shardwise.nn.kernels.quantize_reference import BLOCK, FRACTION, GOLDEN, HEADROOM, LARGEST, packed_bytes

TILE = 16  # blocks per program: 2,048 elements for 4 warps, four loads of 16 bytes for each thread
WARPS = 4


@triton.jit
def _noise(block, seed, HALF: tl.constexpr, GOLD: tl.constexpr, UNIT: tl.constexpr):
    """The noise of both halves of each block, as the reference's `_noise`."""
    h = block.to(tl.uint32) * GOLD + seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    start = ((h ^ (h >> 16)) & 0x7FFFFF).to(tl.int32).to(tl.float32) * UNIT
    j = tl.arange(0, HALF).to(tl.uint32)
    first = ((j * GOLD) >> 9).to(tl.int32).to(tl.float32) * UNIT
    second = (((j + HALF) * GOLD) >> 9).to(tl.int32).to(tl.float32) * UNIT
    low, high = start[:, None] + first[None, :], start[:, None] + second[None, :]
    return low - tl.floor(low), high - tl.floor(high)


@triton.jit
def _step(y, noise, LIMIT: tl.constexpr, RANDOM: tl.constexpr):
    """Codes of equal distance."""
    y = tl.floor(y + noise) if RANDOM else libdevice.rint(y)  # half to even, as torch.round
    return tl.minimum(tl.maximum(y, -LIMIT), LIMIT).to(tl.int32)


@triton.jit
def _power(y, noise, RANDOM: tl.constexpr):
    """Codes of a sign and a power of two, as the reference's `_powers`."""
    size = tl.abs(y)
    if RANDOM:
        bits = size.to(tl.int32, bitcast=True) + (noise * 8388608.0).to(tl.int32)
        small = tl.floor(size + noise).to(tl.int32)
        code = tl.where(size < 1.0, small, tl.minimum(tl.maximum((bits >> 23) - 127, 0), 6) + 1)
    else:
        bits = (size * (4 / 3)).to(tl.int32, bitcast=True)
        code = tl.where(size < 0.5, 0, tl.minimum(tl.maximum((bits >> 23) - 127, 0), 6) + 1)
    return tl.where((y < 0) & (code > 0), code | 8, code)


@triton.jit
def _value(code, BITS: tl.constexpr):
    """What a code stands for, in units of the scale."""
    if BITS == 4:
        size = tl.where((code & 7) == 0, 0.0, ((126 + (code & 7)) << 23).to(tl.float32, bitcast=True))
        return tl.where(code > 7, -size, size)
    else:
        return code.to(tl.float32)


@triton.jit
def _write(
    low, high, out, error, n, codes_end, block, blocks, noise_at, seed,
    BITS: tl.constexpr, HALF: tl.constexpr, LIMIT: tl.constexpr, ROOM: tl.constexpr,
    RANDOM: tl.constexpr, GOLD: tl.constexpr, UNIT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Quantises (TILE, HALF) × 2 and stores codes and scales of one row, and what was lost if KEEP."""
    at = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    if KEEP:
        low += tl.load(error + at, mask=at < n, other=0.0).to(tl.float32)
        high += tl.load(error + at + HALF, mask=at + HALF < n, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    # max() passes over nan, and nan has no code: it must show in the scale.
    broken = tl.sum((low != low).to(tl.int32) + (high != high).to(tl.int32), 1) > 0
    scale = tl.where(broken, float("nan"), most * ROOM).to(tl.bfloat16)
    step = scale.to(tl.float32)
    inverse = tl.where(step > 0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step), 0.0)[:, None]
    noise_low, noise_high = low, high
    if RANDOM:
        noise_low, noise_high = _noise(noise_at + block, seed, HALF, GOLD, UNIT)
    if BITS == 4:
        code_low = _power(low * inverse, noise_low, RANDOM)
        code_high = _power(high * inverse, noise_high, RANDOM)
    else:
        code_low = _step(low * inverse, noise_low, LIMIT, RANDOM)
        code_high = _step(high * inverse, noise_high, LIMIT, RANDOM)
    if KEEP:
        lost_low = low - _value(code_low, BITS) * step[:, None]
        lost_high = high - _value(code_high, BITS) * step[:, None]
        # Of a block with inf or nan nothing is kept: it would come back for ever.
        lost_low = tl.where(tl.abs(lost_low) < float("inf"), lost_low, 0.0)
        lost_high = tl.where(tl.abs(lost_high) < float("inf"), lost_high, 0.0)
        tl.store(error + at, lost_low.to(error.dtype.element_ty), mask=at < n)
        tl.store(error + at + HALF, lost_high.to(error.dtype.element_ty), mask=at + HALF < n)
    low, high = code_low, code_high
    mine = block < blocks
    j = tl.arange(0, HALF)
    tl.store((out + codes_end).to(tl.pointer_type(tl.bfloat16)) + block, scale, mask=mine)
    if BITS == 4:
        place = block.to(tl.int64)[:, None] * HALF + j[None, :]
        tl.store(out + place, ((low & 15) | ((high & 15) << 4)).to(tl.uint8), mask=mine[:, None])
    else:
        place = block.to(tl.int64)[:, None] * (2 * HALF) + j[None, :]
        tl.store(out + place, (low & 255).to(tl.uint8), mask=mine[:, None])
        tl.store(out + place + HALF, (high & 255).to(tl.uint8), mask=mine[:, None])


@triton.jit
def _read(packed, codes_end, block, blocks, BITS: tl.constexpr, HALF: tl.constexpr):
    """(TILE, HALF) × 2 floats of one packed row."""
    mine = block < blocks
    j = tl.arange(0, HALF)
    scale = tl.load((packed + codes_end).to(tl.pointer_type(tl.bfloat16)) + block, mask=mine, other=0.0)
    step = scale.to(tl.float32)[:, None]
    if BITS == 4:
        place = block.to(tl.int64)[:, None] * HALF + j[None, :]
        pair = tl.load(packed + place, mask=mine[:, None], other=0).to(tl.int32)
        low, high = pair & 15, pair >> 4
    else:
        place = block.to(tl.int64)[:, None] * (2 * HALF) + j[None, :]
        low = tl.load(packed + place, mask=mine[:, None], other=0).to(tl.int8, bitcast=True)
        high = tl.load(packed + place + HALF, mask=mine[:, None], other=0).to(tl.int8, bitcast=True)
    return _value(low, BITS) * step, _value(high, BITS) * step


@triton.jit(do_not_specialize=["seed"])
def _quantize(
    out, x, error, n, blocks, inner, x_outer, x_inner, out_outer, out_inner, error_outer, error_inner, codes_end, seed,
    BITS: tl.constexpr, HALF: tl.constexpr, TILES: tl.constexpr, LIMIT: tl.constexpr,
    ROOM: tl.constexpr, RANDOM: tl.constexpr, GOLD: tl.constexpr, UNIT: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    i, j = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    block = tl.program_id(0) * TILES + tl.arange(0, TILES)
    at = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    source = x + i * x_outer + j * x_inner
    low = tl.load(source + at, mask=at < n, other=0.0).to(tl.float32)
    high = tl.load(source + at + HALF, mask=at + HALF < n, other=0.0).to(tl.float32)
    target = out + i * out_outer + j * out_inner
    _write(
        low, high, target, error + i * error_outer + j * error_inner, n, codes_end, block, blocks, row * blocks, seed,
        BITS, HALF, LIMIT, ROOM, RANDOM, GOLD, UNIT, KEEP,
    )  # fmt: skip


@triton.jit
def _dequantize(
    out, packed, n, blocks, inner, out_outer, out_inner, packed_outer, packed_inner, codes_end,
    BITS: tl.constexpr, HALF: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    i, j = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    block = tl.program_id(0) * TILES + tl.arange(0, TILES)
    low, high = _read(packed + i * packed_outer + j * packed_inner, codes_end, block, blocks, BITS, HALF)
    target = out + i * out_outer + j * out_inner
    at = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(target + at, low.to(out.dtype.element_ty), mask=at < n)
    tl.store(target + at + HALF, high.to(out.dtype.element_ty), mask=at + HALF < n)


@triton.jit(do_not_specialize=["seed"])
def _sum(
    out, packed, error, n, blocks, out_row, error_row, packed_peer, packed_row, codes_end, out_codes_end, factor, seed,
    PEERS: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, TILES: tl.constexpr,
    LIMIT: tl.constexpr, ROOM: tl.constexpr, RANDOM: tl.constexpr, GOLD: tl.constexpr, UNIT: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """Adds up the peers' rows in fp32; stores floats, or packs the sum in TO bits."""
    row = tl.program_id(1)
    block = tl.program_id(0) * TILES + tl.arange(0, TILES)
    source = packed + row.to(tl.int64) * packed_row
    low = tl.zeros((TILES, HALF), tl.float32)
    high = tl.zeros((TILES, HALF), tl.float32)
    for _ in range(PEERS):
        one, other = _read(source, codes_end, block, blocks, BITS, HALF)
        low, high = low + one, high + other
        source += packed_peer
    low, high = low * factor, high * factor
    target = out + row.to(tl.int64) * out_row
    if TO:
        _write(
            low, high, target, error + row.to(tl.int64) * error_row, n, out_codes_end, block, blocks, row * blocks,
            seed, TO, HALF, LIMIT, ROOM, RANDOM, GOLD, UNIT, KEEP,
        )  # fmt: skip
    else:
        at = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
        tl.store(target + at, low.to(out.dtype.element_ty), mask=at < n)
        tl.store(target + at + HALF, high.to(out.dtype.element_ty), mask=at + HALF < n)


def quantize_into(out: torch.Tensor, x: torch.Tensor, bits: int, seed: int | None, error: torch.Tensor | None) -> None:
    """Quantises (outer, inner, n) floats to (outer, inner, packed_bytes)."""
    outer, inner, n = x.shape
    error_buffer = x if error is None else error
    _clear_tail(out, n, bits)
    _quantize[_grid(n, outer * inner)](
        out, x, error_buffer, n, _blocks(n), inner, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        error_buffer.stride(0), error_buffer.stride(1), _codes_end(n, bits), seed or 0, **_shape(bits),
        **_rounding(bits, seed),
        KEEP=error is not None, num_warps=WARPS,
    )  # fmt: skip


def dequantize_into(out: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """Dequantises (outer, inner, packed_bytes) to (outer, inner, n)."""
    outer, inner, n = out.shape
    _dequantize[_grid(n, outer * inner)](
        out, packed, n, _blocks(n), inner, out.stride(0), out.stride(1), packed.stride(0), packed.stride(1),
        _codes_end(n, bits), **_shape(bits), num_warps=WARPS,
    )  # fmt: skip


def sum_dequantized_into(out: torch.Tensor, packed: torch.Tensor, bits: int, factor: float) -> None:
    """Sums (peers, rows, packed_bytes) to (rows, n)."""
    _launch_sum(out, packed, out.shape[-1], bits, 0, factor, None, None)


def requantize_sum_into(
    out: torch.Tensor,
    packed: torch.Tensor,
    n: int,
    bits: int,
    to: int,
    factor: float,
    seed: int | None,
    error: torch.Tensor | None,
) -> None:
    """Sums (peers, rows, packed_bytes) to (rows, packed_bytes), from one bit width to another."""
    _clear_tail(out, n, to)
    _launch_sum(out, packed, n, bits, to, factor, seed, error)


def _launch_sum(
    out: torch.Tensor,
    packed: torch.Tensor,
    n: int,
    bits: int,
    to: int,
    factor: float,
    seed: int | None,
    error: torch.Tensor | None,
) -> None:
    peers, rows, _ = packed.shape
    error_buffer = out if error is None else error
    _sum[_grid(n, rows)](
        out, packed, error_buffer, n, _blocks(n), out.stride(0), error_buffer.stride(0), packed.stride(0),
        packed.stride(1),
        _codes_end(n, bits), _codes_end(n, to), float(factor), seed or 0, PEERS=peers, TO=to, **_shape(bits),
        **_rounding(to or bits, seed), KEEP=error is not None, num_warps=WARPS,
    )  # fmt: skip


def _clear_tail(out: torch.Tensor, n: int, bits: int) -> None:
    used = _codes_end(n, bits) + 2 * _blocks(n)
    if used < packed_bytes(n, bits):
        out[..., used:].zero_()


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _codes_end(n: int, bits: int) -> int:
    return _blocks(n) * BLOCK * bits // 8


def _grid(n: int, rows: int) -> tuple[int, int]:
    return (triton.cdiv(_blocks(n), TILE), rows)


def _shape(bits: int) -> dict[str, Any]:
    return {"BITS": bits, "HALF": BLOCK // 2, "TILES": TILE}


def _rounding(bits: int, seed: int | None) -> dict[str, Any]:
    return {
        "LIMIT": float(LARGEST[bits]), "ROOM": HEADROOM / LARGEST[bits], "RANDOM": seed is not None, "GOLD": GOLDEN,
        "UNIT": FRACTION,
    }  # fmt: skip
