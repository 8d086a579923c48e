# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""AdamW on masters in two halves (zero/master.py), fused: what is read and written once costs one pass and one launch.

The reference is `join`, the rule, `split_`; that takes some 25 launches and four times the memory traffic, which is
felt on a GPU that computes the backward at the same time.
"""

from __future__ import annotations

import math

import torch

from shardwise.optim.rules import Hyper
from shardwise.zero.master import join, split_

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without
    triton = None

BLOCK = 1024


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


if triton is not None:

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
