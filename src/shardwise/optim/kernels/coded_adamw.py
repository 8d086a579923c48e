"""AdamW on coded states in one fused pass on a GPU: decode, update, encode, without leaving the registers.

The plain path (`codecs.py` and `rules.py`) does the same in some forty passes over memory and is the reference: the
same codes from the same noise, but for rounding in the last bits of fp32. Imported only if CUDA and Triton are there.
"""

# mypy: ignore-errors
# (Triton code is Python syntax with other semantics.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.optim.codecs import BLOCK, StoredState, wrapped
from shardwise.optim.rules import Hyper

SHAPES = {8: (8, 2), 4: (16, 8)}  # bits: blocks of 128 elements per program, warps; by trying on an H200


@triton.jit
def _noise(index, seed):
    x = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    return x * 0xC2B2AE35


@triton.jit
def _decoded_first(code, scale, MANTISSA: tl.constexpr, LEAST: tl.constexpr, FLOOR: tl.constexpr):
    size = ((tl.abs(code) + LEAST) << (23 - MANTISSA)).to(tl.float32, bitcast=True) - FLOOR
    return tl.where(code < 0, -size, size) * scale


@triton.jit
def _decoded_second(code, scale, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    return ((code + LEAST) << (23 - MANTISSA)).to(tl.float32, bitcast=True) * scale


@triton.jit
def _code(size, random, MANTISSA: tl.constexpr, LEAST: tl.constexpr, TOP: tl.constexpr):
    """The code of a magnitude, rounded stochastically."""
    bits = size.to(tl.int32, bitcast=True) + (random >> (9 + MANTISSA)).to(tl.int32)
    return tl.minimum(tl.maximum((bits >> (23 - MANTISSA)) - LEAST, 0), TOP)


@triton.jit
def _inverse(scale):
    """Factor for a block's values, since a division for each value would take longer than reading it.

    Values of a block whose scale is so small that its inverse overflows fp32 count as zeros.
    """
    return tl.where(scale > 1e-37, 1.0 / scale, 1.0)[:, None]


@triton.jit
def _coded_first(
    value, inverse, index, seed, MANTISSA: tl.constexpr, LEAST: tl.constexpr, FLOOR: tl.constexpr, TOP: tl.constexpr
):
    x = value * inverse
    code = _code(tl.abs(x) + FLOOR, _noise(index, seed), MANTISSA, LEAST, TOP)
    return tl.where(x < 0, -code, code)


@triton.jit
def _coded_second(
    value, inverse, index, seed, MANTISSA: tl.constexpr, LEAST: tl.constexpr, FLOOR: tl.constexpr, TOP: tl.constexpr
):
    x = value * inverse
    return _code(tl.maximum(x, FLOOR), _noise(index, seed), MANTISSA, LEAST, TOP)


@triton.jit
def _adamw(p, g, m, v, shrink, rate, beta1, beta2, root, eps):
    p = p * shrink
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    p = p - rate * m / (tl.sqrt(v) * root + eps)
    return p, m, v


@triton.jit
def _weight(param, low, at, mask, SPLIT: tl.constexpr):
    """An fp32 master, loaded as it is or joined from its bf16 half (as int16) and its low half; see split_master.py."""
    if SPLIT:
        upper = tl.load(param + at, mask, 0).to(tl.int32) << 16
        return (upper + tl.load(low + at, mask, 0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        return tl.load(param + at, mask, 0.0)


@triton.jit
def _store_weight(param, low, at, mask, value, SPLIT: tl.constexpr):
    if SPLIT:
        upper = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
        rest = value.to(tl.int32, bitcast=True) - (upper.to(tl.int32) << 16)
        tl.store(param + at, upper, mask)
        tl.store(low + at, tl.minimum(rest, 32767).to(tl.int16), mask)
    else:
        tl.store(param + at, value, mask)


@triton.jit
def _gradient(grad, scale, at, mask, SCALED: tl.constexpr):
    g = tl.load(grad + at, mask, 0.0).to(tl.float32)
    if SCALED:
        g = g * tl.load(scale)
    return g


@triton.jit(do_not_specialize=["offset", "seed1", "seed2"])
def _kernel_8bit(
    param, low, grad, scale, codes1, scales1, codes2, scales2,
    rows, cols, per_row, stride, offset, seed1, seed2, shrink, rate, beta1, beta2, root, eps,
    M1: tl.constexpr, LEAST1: tl.constexpr, FLOOR1: tl.constexpr, TOP1: tl.constexpr, PEAK1: tl.constexpr,
    M2: tl.constexpr, LEAST2: tl.constexpr, FLOOR2: tl.constexpr, TOP2: tl.constexpr, PEAK2: tl.constexpr,
    SIZE: tl.constexpr, COUNT: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    in_range = block < rows * per_row
    row = block // per_row
    col = (block % per_row)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    at = row[:, None] * cols + col
    mask = in_range[:, None] & (col < cols)
    s1 = tl.load(scales1 + block, in_range, 0.0)[:, None]
    s2 = tl.load(scales2 + block, in_range, 0.0)[:, None]
    m = _decoded_first(tl.load(codes1 + at, mask, 0).to(tl.int32), s1, M1, LEAST1, FLOOR1)
    v = _decoded_second(tl.load(codes2 + at, mask, 0).to(tl.int32), s2, M2, LEAST2)
    p = _weight(param, low, at, mask, SPLIT)
    g = _gradient(grad, scale, at, mask, SCALED)
    p, m, v = _adamw(p, g, m, v, shrink, rate, beta1, beta2, root, eps)
    _store_weight(param, low, at, mask, p, SPLIT)
    s1 = tl.max(tl.where(mask, tl.abs(m), 0.0), 1) / PEAK1
    s2 = tl.max(tl.where(mask, v, 0.0), 1) / PEAK2
    tl.store(scales1 + block, s1, in_range)
    tl.store(scales2 + block, s2, in_range)
    index = row[:, None] * stride + col + offset
    c1 = _coded_first(m, _inverse(s1), index, seed1, M1, LEAST1, FLOOR1, TOP1)
    c2 = _coded_second(v, _inverse(s2), index, seed2, M2, LEAST2, FLOOR2, TOP2)
    tl.store(codes1 + at, c1.to(tl.int8), mask)
    tl.store(codes2 + at, c2.to(tl.uint8), mask)


@triton.jit(do_not_specialize=["offset", "seed1", "seed2"])
def _kernel_4bit(
    param, low, grad, scale, codes1, scales1, codes2, scales2,
    rows, cols, per_row, stride, offset, seed1, seed2, shrink, rate, beta1, beta2, root, eps,
    M1: tl.constexpr, LEAST1: tl.constexpr, FLOOR1: tl.constexpr, TOP1: tl.constexpr, PEAK1: tl.constexpr,
    M2: tl.constexpr, LEAST2: tl.constexpr, FLOOR2: tl.constexpr, TOP2: tl.constexpr, PEAK2: tl.constexpr,
    SIZE: tl.constexpr, COUNT: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """4-bit variant: a byte holds an even column and the odd one after it, which are updated together."""
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    in_range = block < rows * per_row
    row = (block // per_row)[:, None]
    pair = (block % per_row)[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    byte = row * ((cols + 1) // 2) + pair
    a = row * cols + 2 * pair
    b = a + 1
    mask_a = in_range[:, None] & (2 * pair < cols)
    mask_b = in_range[:, None] & (2 * pair + 1 < cols)
    s1 = tl.load(scales1 + block, in_range, 0.0)[:, None]
    s2 = tl.load(scales2 + block, in_range, 0.0)[:, None]
    both1 = tl.load(codes1 + byte, mask_a, 0).to(tl.int32)
    both2 = tl.load(codes2 + byte, mask_a, 0).to(tl.int32)
    m_a = _decoded_first(((both1 & 15) ^ 8) - 8, s1, M1, LEAST1, FLOOR1)
    m_b = _decoded_first(((both1 >> 4) ^ 8) - 8, s1, M1, LEAST1, FLOOR1)
    v_a = _decoded_second(both2 & 15, s2, M2, LEAST2)
    v_b = _decoded_second(both2 >> 4, s2, M2, LEAST2)
    p_a = _weight(param, low, a, mask_a, SPLIT)
    g_a = _gradient(grad, scale, a, mask_a, SCALED)
    p_b = _weight(param, low, b, mask_b, SPLIT)
    g_b = _gradient(grad, scale, b, mask_b, SCALED)
    p_a, m_a, v_a = _adamw(p_a, g_a, m_a, v_a, shrink, rate, beta1, beta2, root, eps)
    p_b, m_b, v_b = _adamw(p_b, g_b, m_b, v_b, shrink, rate, beta1, beta2, root, eps)
    _store_weight(param, low, a, mask_a, p_a, SPLIT)
    _store_weight(param, low, b, mask_b, p_b, SPLIT)
    largest = tl.maximum(tl.where(mask_a, tl.abs(m_a), 0.0), tl.where(mask_b, tl.abs(m_b), 0.0))
    s1 = tl.max(largest, 1) / PEAK1
    s2 = tl.max(tl.maximum(tl.where(mask_a, v_a, 0.0), tl.where(mask_b, v_b, 0.0)), 1) / PEAK2
    tl.store(scales1 + block, s1, in_range)
    tl.store(scales2 + block, s2, in_range)
    index = row * stride + 2 * pair + offset
    inverse = _inverse(s1)
    c_a = _coded_first(m_a, inverse, index, seed1, M1, LEAST1, FLOOR1, TOP1)
    c_b = tl.where(mask_b, _coded_first(m_b, inverse, index + 1, seed1, M1, LEAST1, FLOOR1, TOP1), 0)
    tl.store(codes1 + byte, ((c_a & 15) | ((c_b & 15) << 4)).to(tl.uint8), mask_a)
    inverse = _inverse(s2)
    c_a = _coded_second(v_a, inverse, index, seed2, M2, LEAST2, FLOOR2, TOP2)
    c_b = tl.where(mask_b, _coded_second(v_b, inverse, index + 1, seed2, M2, LEAST2, FLOOR2, TOP2), 0)
    tl.store(codes2 + byte, (c_a | (c_b << 4)).to(tl.uint8), mask_a)


def adamw(
    param: Tensor,
    grad: Tensor,
    mean: StoredState,
    square: StoredState,
    offset: int,
    hyper: Hyper,
    low: Tensor | None = None,
    scale: Tensor | None = None,
    stride: int | None = None,
) -> None:
    """One step of AdamW on a [rows, cols] piece and its coded moments, in place.

    `offset` is the index of the piece's first element in the full parameter, `stride` the distance of rows there (by
    default their length). With `low`, the parameter is bf16 and
    `low` is the other half of its fp32 master. `scale` multiplies the gradient first.
    """
    rows, cols = param.shape
    first = mean.codec
    second = square.codec
    assert first.bits == second.bits and first.signed and not second.signed
    assert first.stochastic and second.stochastic and first.block == second.block == BLOCK
    assert param.is_contiguous() and grad.is_contiguous()
    assert all(part.is_contiguous() for state in (mean, square) for part in state.parts.values())
    per_row = -(-cols // BLOCK)
    beta1, beta2 = hyper.betas
    kernel = _kernel_8bit if first.bits == 8 else _kernel_4bit
    blocks, warps = SHAPES[first.bits]
    with torch.cuda.device(param.device) if param.is_cuda else torch.device("cpu"):
        kernel[(triton.cdiv(rows * per_row, blocks),)](
            param if low is None else param.view(torch.int16), param if low is None else low,
            grad, grad if scale is None else scale,
            mean.parts["codes"], mean.parts["scales"], square.parts["codes"], square.parts["scales"],
            rows, cols, per_row, cols if stride is None else stride,
            wrapped(offset), wrapped(mean.seed), wrapped(square.seed),
            1 - hyper.lr * hyper.weight_decay, hyper.lr / (1 - beta1**hyper.step), beta1, beta2,
            (1 - beta2**hyper.step) ** -0.5, hyper.eps,
            first.mantissa, first.least, first.floor, first.top, first.peak,
            second.mantissa, second.least, second.floor, second.top, second.peak,
            BLOCK, blocks, low is not None, scale is not None, num_warps=warps,
        )  # fmt: skip
