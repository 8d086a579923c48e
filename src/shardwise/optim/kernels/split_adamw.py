# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""AdamW on masters in two halves (optim/split_master.py), fused: one pass and one launch.

The reference is `join`, the rule, `split_`; that takes some 25 launches and four times the memory traffic, which slows
down a backward running at the same time.
"""

from __future__ import annotations

import math

import torch

from shardwise.nn.kernels.multi_tensor_apply import addresses, places
from shardwise.optim.rules import Hyper
from shardwise.optim.split_master import join, split_

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
    _split_adamw[(triton.cdiv(count, BLOCK),)](
        high.view(torch.int16),
        low,
        gradient,
        mean,
        square,
        gradient if scale is None else scale,
        count,
        *_scalars(hyper),
        scale is not None,
        BLOCK,
    )


def _scalars(hyper: Hyper) -> tuple[float, ...]:
    """Arguments keep, rate, root, beta1, beta2 and eps of the kernels."""
    beta1, beta2 = hyper.betas
    keep = 1 - hyper.lr * hyper.weight_decay
    rate = hyper.lr / (1 - beta1**hyper.step)
    root = math.sqrt(1 - beta2**hyper.step)
    return keep, rate, root, beta1, beta2, hyper.eps


def split_adamw_together(
    highs: list[torch.Tensor],
    blob: torch.Tensor,
    layout: torch.Tensor,
    gradients: list[torch.Tensor],
    scale: torch.Tensor | None,
    hyper: Hyper,
) -> None:
    """The same for many tensors on one GPU in one launch; gradients are all bf16 or all fp32, and contiguous.

    `layout` has a row for each tensor: its number of elements, and the byte offsets of low half, mean and square in
    `blob`.
    """
    pointers, aligned = addresses(highs, gradients)
    where = places(tuple(high.numel() for high in highs), BLOCK, blob.device)
    with torch.cuda.device(blob.device):
        _split_adamw_together[(len(where),)](
            blob,
            where,
            layout,
            pointers,
            blob if scale is None else scale,
            *_scalars(hyper),
            scale is not None,
            gradients[0].dtype == torch.bfloat16,
            aligned,
            BLOCK,
        )


def split_adamw_reference(
    high: torch.Tensor,
    low: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    scale: torch.Tensor | None,
    hyper: Hyper,
) -> None:
    """Reference implementation of `split_adamw` in plain PyTorch."""
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
        mask = at < count
        gradient = tl.load(gradient_at + at, mask).to(tl.float32)
        if SCALED:
            gradient = gradient * tl.load(scale_at)
        _step(high_at + at, low_at + at, mean_at + at, square_at + at, gradient, mask, keep, rate, root, beta1, beta2,
              eps)  # fmt: skip

    @triton.jit
    def _split_adamw_together(
        blob, where, layout, pointers, scale_at, keep, rate, root, beta1, beta2, eps,
        SCALED: tl.constexpr, HALF: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        place = where + tl.program_id(0) * 2
        tensor = tl.load(place)
        start = tl.multiple_of(tl.load(place + 1), BLOCK)
        row = layout + tensor * 4
        at = start + tl.arange(0, BLOCK)
        mask = at < tl.load(row)
        high, source = tl.load(pointers + tensor * 2), tl.load(pointers + tensor * 2 + 1)
        if ALIGNED:
            high, source = tl.multiple_of(high, 16), tl.multiple_of(source, 16)
        if HALF:
            gradient = tl.load(source.to(tl.pointer_type(tl.bfloat16)) + at, mask).to(tl.float32)
        else:
            gradient = tl.load(source.to(tl.pointer_type(tl.float32)) + at, mask)
        if SCALED:
            gradient = gradient * tl.load(scale_at)
        low = blob + tl.multiple_of(tl.load(row + 1), 64)
        mean = blob + tl.multiple_of(tl.load(row + 2), 64)
        square = blob + tl.multiple_of(tl.load(row + 3), 64)
        _step(
            high.to(tl.pointer_type(tl.int16)) + at, low.to(tl.pointer_type(tl.int16)) + at,
            mean.to(tl.pointer_type(tl.float32)) + at, square.to(tl.pointer_type(tl.float32)) + at, gradient, mask,
            keep, rate, root, beta1, beta2, eps,
        )  # fmt: skip

    @triton.jit
    def _step(high_at, low_at, mean_at, square_at, gradient, mask, keep, rate, root, beta1, beta2, eps):
        upper = tl.load(high_at, mask).to(tl.int32) << 16
        weight = (upper + tl.load(low_at, mask).to(tl.int32)).to(tl.float32, bitcast=True)
        mean = tl.load(mean_at, mask)
        square = tl.load(square_at, mask)
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient * gradient
        weight = weight * keep - rate * mean / (tl.sqrt(square) / root + eps)
        rounded = weight.to(tl.bfloat16).to(tl.int16, bitcast=True)
        rest = weight.to(tl.int32, bitcast=True) - (rounded.to(tl.int32) << 16)
        tl.store(high_at, rounded, mask)
        tl.store(low_at, tl.minimum(rest, 32767).to(tl.int16), mask)
        tl.store(mean_at, mean, mask)
        tl.store(square_at, square, mask)
