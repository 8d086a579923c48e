# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""AdamW on masters in two halves (zero/master.py), fused: what is read and written once costs one pass and one launch.

The reference is `join`, the rule, `split_`; that takes some 25 launches and four times the memory traffic, which is felt
on a GPU that computes the backward at the same time.
"""

from __future__ import annotations

import math

import torch

from shardwise.optim.codecs import FIRST, SECOND, Blockwise, Parts, _int32, columns
from shardwise.optim.rules import Hyper
from shardwise.zero.master import join, split_

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

BLOCK = 1024
ROWS = 8  # blocks of coded states per program


def split_adamw(
    high: torch.Tensor,
    low: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    scale: torch.Tensor | None,
    hyper: Hyper,
) -> None:
    """One AdamW step on bf16 weights, their low halves and fp32 moments, in place; `scale` multiplies the gradient."""
    if not high.is_cuda or triton is None:
        split_adamw_reference(high, low, gradient, mean, square, scale, hyper)
        return
    count = high.numel()
    beta1, beta2 = hyper.betas
    _split_adamw[(triton.cdiv(count, BLOCK),)](
        high.view(torch.int16), low, gradient, mean, square, gradient if scale is None else scale, count,
        1 - hyper.lr * hyper.weight_decay, hyper.lr / (1 - beta1**hyper.step), math.sqrt(1 - beta2**hyper.step),
        beta1, beta2, hyper.eps, scale is not None, BLOCK,
    )  # fmt: skip


def split_adamw_reference(
    high: torch.Tensor,
    low: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    scale: torch.Tensor | None,
    hyper: Hyper,
) -> None:
    """The same in plain steps."""
    from shardwise.optim.rules import AdamW

    master = join(high, low)
    rows = gradient.float() if scale is None else gradient.float() * scale
    AdamW()([master], [rows], {"exp_avg": [mean], "exp_avg_sq": [square]}, hyper)
    split_(master, high, low)


def coded_adamw(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    gradient: torch.Tensor,
    mean: Parts,
    square: Parts,
    scale: torch.Tensor | None,
    hyper: Hyper,
    seeds: tuple[int, int],
    offset: int,
) -> bool:
    """One AdamW step on 8-bit moments and a master, whole (fp32) or split (bf16 and low half), in place.

    Says whether it was done: it is for CUDA, and for rows that blocks divide.
    """
    first, second = FIRST["8bit"], SECOND["8bit"]
    assert isinstance(first, Blockwise) and isinstance(second, Blockwise)
    if not weight.is_cuda or triton is None or columns(weight.shape) % first.block:
        return False
    blocks = weight.numel() // first.block
    beta1, beta2 = hyper.betas
    _coded_adamw[(triton.cdiv(blocks, ROWS),)](
        weight if low is None else weight.view(torch.int16), weight if low is None else low, gradient, mean["codes"],
        mean["scales"], square["codes"], square["scales"], gradient if scale is None else scale, blocks,
        1 - hyper.lr * hyper.weight_decay, hyper.lr / (1 - beta1**hyper.step), math.sqrt(1 - beta2**hyper.step),
        beta1, beta2, hyper.eps, *(_int32(n) for n in (*seeds, offset)), low is not None, scale is not None,
        ROWS, first.block, first.shift, first.least, first.floor, first.peak, first.top,
        second.least, second.floor, second.peak, second.top,
    )  # fmt: skip
    return True


if triton is not None:

    @triton.jit
    def _noise(at, seed):
        """codecs.noise, as unsigned numbers."""
        x = at.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
        x = (x ^ (x >> 16)) * 0x85EBCA6B
        return (x ^ (x >> 13)) * 0xC2B2AE35

    @triton.jit(do_not_specialize=["seed1", "seed2", "offset"])
    def _coded_adamw(
        weight_at, low_at, gradient_at, mean_at, mean_scale_at, square_at, square_scale_at, scale_at, blocks,
        keep, rate, root, beta1, beta2, eps, seed1, seed2, offset, SPLIT: tl.constexpr, SCALED: tl.constexpr,
        ROWS: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr,
        LEAST1: tl.constexpr, FLOOR1: tl.constexpr, PEAK1: tl.constexpr, TOP1: tl.constexpr,
        LEAST2: tl.constexpr, FLOOR2: tl.constexpr, PEAK2: tl.constexpr, TOP2: tl.constexpr,
    ):  # fmt: skip
        block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = block < blocks
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        here = inside[:, None] & (at >= 0)
        if SPLIT:
            upper = tl.load(weight_at + at, here, other=0).to(tl.int32) << 16
            weight = (upper + tl.load(low_at + at, here, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
        else:
            weight = tl.load(weight_at + at, here, other=0.0)
        gradient = tl.load(gradient_at + at, here, other=0.0).to(tl.float32)
        if SCALED:
            gradient = gradient * tl.load(scale_at)
        code = tl.load(mean_at + at, here, other=0).to(tl.int32)
        size = ((tl.abs(code) + LEAST1) << SHIFT).to(tl.float32, bitcast=True) - FLOOR1
        mean = tl.where(code < 0, -size, size) * tl.load(mean_scale_at + block, inside, other=0.0)[:, None]
        code = tl.load(square_at + at, here, other=0).to(tl.int32)
        square = ((code + LEAST2) << SHIFT).to(tl.float32, bitcast=True)
        square = square * tl.load(square_scale_at + block, inside, other=0.0)[:, None]

        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient * gradient
        weight = weight * keep - rate * mean / (tl.sqrt(square) / root + eps)

        if SPLIT:
            rounded = weight.to(tl.bfloat16).to(tl.int16, bitcast=True)
            rest = weight.to(tl.int32, bitcast=True) - (rounded.to(tl.int32) << 16)
            tl.store(weight_at + at, rounded, here)
            tl.store(low_at + at, tl.minimum(rest, 32767).to(tl.int16), here)
        else:
            tl.store(weight_at + at, weight, here)
        place = at + offset
        scale = tl.max(tl.abs(mean), 1) / PEAK1
        tl.store(mean_scale_at + block, scale, inside)
        size = tl.abs(mean) / tl.where(scale == 0, 1.0, scale)[:, None] + FLOOR1
        bits = size.to(tl.int32, bitcast=True) + (_noise(place, seed1) >> (32 - SHIFT)).to(tl.int32)
        code = tl.minimum(tl.maximum((bits >> SHIFT) - LEAST1, 0), TOP1)
        tl.store(mean_at + at, tl.where(mean < 0, -code, code).to(tl.int8), here)
        scale = tl.max(square, 1) / PEAK2
        tl.store(square_scale_at + block, scale, inside)
        size = tl.maximum(square / tl.where(scale == 0, 1.0, scale)[:, None], FLOOR2)
        bits = size.to(tl.int32, bitcast=True) + (_noise(place, seed2) >> (32 - SHIFT)).to(tl.int32)
        code = tl.minimum(tl.maximum((bits >> SHIFT) - LEAST2, 0), TOP2)
        tl.store(square_at + at, code.to(tl.uint8), here)

    @triton.jit
    def _split_adamw(
        high_at, low_at, gradient_at, mean_at, square_at, scale_at, count, keep, rate, root, beta1, beta2, eps,
        SCALED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        here = at < count
        upper = tl.load(high_at + at, here).to(tl.int32) << 16
        weight = (upper + tl.load(low_at + at, here).to(tl.int32)).to(tl.float32, bitcast=True)
        gradient = tl.load(gradient_at + at, here).to(tl.float32)
        if SCALED:
            gradient = gradient * tl.load(scale_at)
        mean = tl.load(mean_at + at, here)
        square = tl.load(square_at + at, here)
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient * gradient
        weight = weight * keep - rate * mean / (tl.sqrt(square) / root + eps)
        rounded = weight.to(tl.bfloat16).to(tl.int16, bitcast=True)
        rest = weight.to(tl.int32, bitcast=True) - (rounded.to(tl.int32) << 16)
        tl.store(high_at + at, rounded, here)
        tl.store(low_at + at, tl.minimum(rest, 32767).to(tl.int16), here)
        tl.store(mean_at + at, mean, here)
        tl.store(square_at + at, square, here)
