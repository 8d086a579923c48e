"""Block quantisation in plain PyTorch: the reference of the Triton kernels, and what runs on a CPU.

It processes a row in pieces that stay in the cache, because on a CPU such code is bound by memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

BLOCK = 128  # 1.6% of int8 and 3.1% of int4 go to scales; larger blocks save little and lose precision
ALIGN = 16  # bytes; the widest load of a GPU thread
LARGEST = {4: 64, 8: 127}  # what the largest code stands for, in units of the scale
# A scale rounds to bf16 by up to 2⁻⁹ of itself; this much more keeps the largest element within the codes.
HEADROOM = 1 + 2**-8
PIECE = 512  # blocks: 256 KiB of fp32
GOLDEN, MASK, FRACTION = 0x9E3779B1, 0xFFFFFFFF, 2.0**-23


def packed_bytes(n: int, bits: int) -> int:
    """See quantize.packed_bytes."""
    blocks = -(-n // BLOCK)
    return -(-(blocks * (BLOCK * bits // 8 + 2)) // ALIGN) * ALIGN


def quantize_into(out: torch.Tensor, x: torch.Tensor, bits: int, seed: int | None, error: torch.Tensor | None) -> None:
    """Quantises (outer, inner, n) floats to (outer, inner, packed_bytes)."""
    outer, inner, n = x.shape
    for i in range(outer):
        for j in range(inner):
            codes, scales = _cleared(out[i, j], n, bits)
            row_error = None if error is None else error[i, j]
            for block, piece in _pieces(x[i, j], n):
                _quantize_piece(codes, scales, piece, block, bits, seed, i * inner + j, row_error)


def dequantize_into(out: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """Dequantises (outer, inner, packed_bytes) to (outer, inner, n)."""
    outer, inner, n = out.shape
    for i in range(outer):
        for j in range(inner):
            codes, scales = _parts(packed[i, j], n, bits)
            for block in range(0, len(scales), PIECE):
                values = _dequantize_piece(codes, scales, block, bits)
                _store(out[i, j], values, block)


def sum_dequantized_into(out: torch.Tensor, packed: torch.Tensor, bits: int, factor: float) -> None:
    """Sums (peers, rows, packed_bytes) to (rows, n)."""
    for row, target in enumerate(out):
        for block, values in _sums(packed[:, row], target.shape[-1], bits, factor):
            _store(target, values, block)


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
    for row, target in enumerate(out):
        codes, scales = _cleared(target, n, to)
        row_error = None if error is None else error[row]
        for block, values in _sums(packed[:, row], n, bits, factor):
            _quantize_piece(codes, scales, values, block, to, seed, row, row_error)


def _parts(row: torch.Tensor, n: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (blocks, bytes) and bf16 scales (blocks,) of one packed row, as views."""
    blocks = -(-n // BLOCK)
    size = blocks * BLOCK * bits // 8
    return row[:size].view(blocks, -1), row[size : size + 2 * blocks].view(torch.bfloat16)


def _cleared(row: torch.Tensor, n: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of a row to be written, with zeros behind them: what is sent must be deterministic."""
    used = -(-n // BLOCK) * (BLOCK * bits // 8 + 2)
    row[used:].zero_()
    return _parts(row, n, bits)


def _pieces(row: torch.Tensor, n: int) -> Iterator[tuple[int, torch.Tensor]]:
    """First block, and up to PIECE blocks of fp32; the last block is padded with zeros."""
    full_blocks = n // BLOCK
    for block in range(0, full_blocks, PIECE):
        yield block, row[block * BLOCK : min(block + PIECE, full_blocks) * BLOCK].view(-1, BLOCK).float()
    if n % BLOCK:
        last = torch.zeros(1, BLOCK, device=row.device)
        last[0, : n % BLOCK] = row[full_blocks * BLOCK :]
        yield full_blocks, last


def _quantize_piece(
    codes: torch.Tensor,
    scales: torch.Tensor,
    x: torch.Tensor,
    block: int,
    bits: int,
    seed: int | None,
    row: int,
    error: torch.Tensor | None,
) -> None:
    end = block + len(x)
    if error is not None:
        carried = error[block * BLOCK : end * BLOCK].float()
        x = x + torch.nn.functional.pad(carried, (0, x.numel() - len(carried))).view_as(x)
    scale = (x.abs().amax(1) * (HEADROOM / LARGEST[bits])).to(torch.bfloat16)
    scales[block:end] = scale
    step = scale.float()
    y = x * torch.where(step > 0, step.reciprocal(), 0.0)[:, None]
    noise = None if seed is None else _noise(row * len(scales) + block, len(x), seed, x.device)
    code = _steps(y, noise) if bits == 8 else _powers(y, noise)
    if bits == 4:
        code = code[:, : BLOCK // 2] | (code[:, BLOCK // 2 :] << 4)
    codes[block:end] = code.view(torch.uint8)
    if error is not None:
        rounding_error = x - _dequantize_piece(codes, scales, block, bits)[: len(x)]
        _store(error, rounding_error.nan_to_num_(0.0, 0.0, 0.0), block)


def _steps(y: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Codes of equal distance."""
    y = y.round_() if noise is None else y.add_(noise).floor_()
    return y.clamp_(-LARGEST[8], LARGEST[8]).to(torch.int8)


def _powers(y: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Codes of a sign and a power of two; see quantize's note."""
    size = y.abs()
    if noise is None:
        exponent = ((size * (4 / 3)).view(torch.int32) >> 23) - 127
        code = torch.where(size < 0.5, 0, exponent.clamp(0, 6) + 1)
    else:
        exponent = ((size.view(torch.int32) + (noise * 2**23).to(torch.int32)) >> 23) - 127
        code = torch.where(size < 1, (size + noise).floor().to(torch.int32), exponent.clamp(0, 6) + 1)
    return (code | torch.where((y < 0) & (code > 0), 8, 0)).to(torch.uint8)


def _dequantize_piece(codes: torch.Tensor, scales: torch.Tensor, block: int, bits: int) -> torch.Tensor:
    step = scales[block : block + PIECE].float()[:, None]
    if bits == 8:
        return codes[block : block + PIECE].view(torch.int8) * step
    code = codes[block : block + PIECE].to(torch.int32)
    return _sizes(str(code.device))[torch.cat([code & 15, code >> 4], 1)] * step


@lru_cache
def _sizes(device: str) -> torch.Tensor:
    """The value of each of the 16 codes."""
    sizes = [0.0] + [2.0**k for k in range(7)]
    return torch.tensor(sizes + [-s for s in sizes], device=device)


def _sums(rows: torch.Tensor, n: int, bits: int, factor: float) -> Iterator[tuple[int, torch.Tensor]]:
    parts = [_parts(row, n, bits) for row in rows]
    for block in range(0, -(-n // BLOCK), PIECE):
        total = _dequantize_piece(*parts[0], block, bits)
        for codes, scales in parts[1:]:
            total += _dequantize_piece(codes, scales, block, bits)
        yield block, total.mul_(factor) if factor != 1.0 else total


def _store(target: torch.Tensor, values: torch.Tensor, block: int) -> None:
    flat = target[block * BLOCK : (block + len(values)) * BLOCK]
    flat.copy_(values.view(-1)[: len(flat)])


def _noise(first: int, blocks: int, seed: int, device: torch.device) -> torch.Tensor:
    """In [0, 1): per block a hash of seed and place, plus the golden sequence, modulo 1. See quantize's note."""
    h = (torch.arange(first, first + blocks, dtype=torch.int64, device=device) * GOLDEN + seed) & MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & MASK
    start = ((h ^ (h >> 16)) & 0x7FFFFF).float() * FRACTION
    return (start[:, None] + _sequence(str(device))).frac_()


@lru_cache
def _sequence(device: str) -> torch.Tensor:
    j = torch.arange(BLOCK, dtype=torch.int64)
    return (((j * GOLDEN) & MASK) >> 9).float().mul_(FRACTION).to(device)
