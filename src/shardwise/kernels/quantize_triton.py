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

from shardwise.kernels.quantize_reference import BLOCK, FRACTION, GOLDEN, HEADROOM, LARGEST, packed_bytes

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
def _write(
    low, high, out, codes_end, block, blocks, noise_at, seed,
    BITS: tl.constexpr, HALF: tl.constexpr, LIMIT: tl.constexpr, ROOM: tl.constexpr,
    RANDOM: tl.constexpr, GOLD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Quantises (TILE, HALF) × 2 and stores codes and scales of one row."""
    most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    # max() passes over nan, and nan has no code: it must show in the scale.
    broken = tl.sum((low != low).to(tl.int32) + (high != high).to(tl.int32), 1) > 0
    scale = tl.where(broken, float("nan"), most * ROOM).to(tl.bfloat16)
    step = scale.to(tl.float32)
    inverse = tl.where(step > 0, tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step), 0.0)[:, None]
    low, high = low * inverse, high * inverse
    if RANDOM:
        noise_low, noise_high = _noise(noise_at + block, seed, HALF, GOLD, UNIT)
        low, high = tl.floor(low + noise_low), tl.floor(high + noise_high)
    else:
        low, high = libdevice.rint(low), libdevice.rint(high)  # half to even, as torch.round
    low = tl.minimum(tl.maximum(low, -LIMIT), LIMIT).to(tl.int32)
    high = tl.minimum(tl.maximum(high, -LIMIT), LIMIT).to(tl.int32)
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
        low, high = (pair << 28) >> 28, (pair << 24) >> 28
    else:
        place = block.to(tl.int64)[:, None] * (2 * HALF) + j[None, :]
        low = tl.load(packed + place, mask=mine[:, None], other=0).to(tl.int8, bitcast=True)
        high = tl.load(packed + place + HALF, mask=mine[:, None], other=0).to(tl.int8, bitcast=True)
    return low.to(tl.float32) * step, high.to(tl.float32) * step


@triton.jit(do_not_specialize=["seed"])
def _quantize(
    out, x, n, blocks, inner, x_outer, x_inner, out_outer, out_inner, codes_end, seed,
    BITS: tl.constexpr, HALF: tl.constexpr, TILES: tl.constexpr, LIMIT: tl.constexpr,
    ROOM: tl.constexpr, RANDOM: tl.constexpr, GOLD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    i, j = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
    block = tl.program_id(0) * TILES + tl.arange(0, TILES)
    at = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    source = x + i * x_outer + j * x_inner
    low = tl.load(source + at, mask=at < n, other=0.0).to(tl.float32)
    high = tl.load(source + at + HALF, mask=at + HALF < n, other=0.0).to(tl.float32)
    target = out + i * out_outer + j * out_inner
    _write(low, high, target, codes_end, block, blocks, row * blocks, seed, BITS, HALF, LIMIT, ROOM, RANDOM, GOLD, UNIT)


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
    out, packed, n, blocks, out_row, packed_peer, packed_row, codes_end, factor, seed,
    PEERS: tl.constexpr, AGAIN: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, TILES: tl.constexpr,
    LIMIT: tl.constexpr, ROOM: tl.constexpr, RANDOM: tl.constexpr, GOLD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Adds up the peers' rows in fp32; stores floats, or packs the sum AGAIN."""
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
    if AGAIN:
        _write(
            low, high, target, codes_end, block, blocks, row * blocks, seed,
            BITS, HALF, LIMIT, ROOM, RANDOM, GOLD, UNIT,
        )  # fmt: skip
    else:
        at = block.to(tl.int64)[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
        tl.store(target + at, low.to(out.dtype.element_ty), mask=at < n)
        tl.store(target + at + HALF, high.to(out.dtype.element_ty), mask=at + HALF < n)


def quantize_into(out: torch.Tensor, x: torch.Tensor, bits: int, seed: int | None) -> None:
    """(outer, inner, n) floats → (outer, inner, packed_bytes)."""
    outer, inner, n = x.shape
    _clear_tail(out, n, bits)
    _quantize[_grid(n, outer * inner)](
        out, x, n, _blocks(n), inner, x.stride(0), x.stride(1), out.stride(0), out.stride(1), _codes_end(n, bits),
        seed or 0, **_shape(bits), **_rounding(bits, seed), num_warps=WARPS,
    )  # fmt: skip


def dequantize_into(out: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """(outer, inner, packed_bytes) → (outer, inner, n)."""
    outer, inner, n = out.shape
    _dequantize[_grid(n, outer * inner)](
        out, packed, n, _blocks(n), inner, out.stride(0), out.stride(1), packed.stride(0), packed.stride(1),
        _codes_end(n, bits), **_shape(bits), num_warps=WARPS,
    )  # fmt: skip


def sum_dequantized_into(out: torch.Tensor, packed: torch.Tensor, bits: int, factor: float) -> None:
    """(peers, rows, packed_bytes) → (rows, n)."""
    _launch_sum(out, packed, out.shape[-1], bits, factor, None, again=False)


def requantize_sum_into(
    out: torch.Tensor, packed: torch.Tensor, n: int, bits: int, factor: float, seed: int | None
) -> None:
    """(peers, rows, packed_bytes) → (rows, packed_bytes)."""
    _clear_tail(out, n, bits)
    _launch_sum(out, packed, n, bits, factor, seed, again=True)


def _launch_sum(
    out: torch.Tensor, packed: torch.Tensor, n: int, bits: int, factor: float, seed: int | None, again: bool
) -> None:
    peers, rows, _ = packed.shape
    _sum[_grid(n, rows)](
        out, packed, n, _blocks(n), out.stride(0), packed.stride(0), packed.stride(1), _codes_end(n, bits),
        float(factor), seed or 0, PEERS=peers, AGAIN=again, **_shape(bits), **_rounding(bits, seed), num_warps=WARPS,
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
