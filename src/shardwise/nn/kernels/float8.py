"""A matrix product in fp8, forward and backward, for weights and activations that are stored in 16 bits.

Both operands are scaled so that their largest value is the largest of the format, rounded to 8 bits, multiplied on the
tensor cores (which accumulate in fp32), and the result is scaled back. Forward and weights use e4m3 (3 bits of
mantissa); gradients use e5m2 (more range) where one scale serves a full tensor.

`tensorwise`: one scale per tensor, the fastest. What backward needs of the input is saved in 8 bits: half the memory.
`rowwise`: one scale per row of each product's operands, so that an outlier costs its own row alone; each product rounds
from the 16-bit tensors anew, along the dimension it sums over.

[Note: one inverse] A weight with one scale is rounded by ranks that send it and by layers that multiply it
(pack_float8.py), and must get the same codes, though compiled code divides less exactly than torch does. So its factor,
448 / largest, has 8 bits of mantissa, as both numbers have: the nearest tie is 2⁻¹⁷ away, so that any division finds
the same; and its products with bf16 numbers are exact in fp32.

Everything but the rounding to two layouts (transposed_round.py) is plain torch, so that a compiled block fuses it with
what comes before.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from shardwise.core.compat.torch_private import scaled_mm
from shardwise.core.effective_device import effective_device
from shardwise.nn.kernels.transposed_round import lengthened, round_both, round_transposed, rounded

Recipe = Literal["tensorwise", "rowwise"]
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 2.0**-40  # below it a tensor counts as zero; a bf16 number: see [Note: rounding twice] in pack_float8.py


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, fast: bool = False
) -> torch.Tensor:
    """Returns x · weightᵀ + bias; `weight` is out × in, both dimensions multiples of 16.

    `fast`: backward's products accumulate with fewer bits, as forward's do.
    """
    flat = x.reshape(-1, x.shape[-1])
    product = _Tensorwise if recipe == "tensorwise" else _Rowwise
    out: torch.Tensor = product.apply(flat, weight.to(x.dtype), fast)
    out = out.view(*x.shape[:-1], out.shape[-1])
    return out if bias is None else out + bias.to(out.dtype)


class _Tensorwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, fast: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.fast = fast
        x_scale = scale_of(x, FORWARD)
        inverse = inverse_for(largest_of(weight))
        if ctx.needs_input_grad[1]:  # the other layout is what its product will want, and all that is kept of x
            by_rows, transposed = round_both(x, x_scale.reciprocal(), FORWARD)
        else:
            by_rows = cast(x, x_scale, FORWARD)
            transposed = None
        # The weight itself is kept, not its 8 bits: FSDP frees it and gathers it again in between.
        ctx.save_for_backward(transposed, x_scale, weight, inverse)
        columns = rounded(weight, inverse, FORWARD).t()
        return multiply(by_rows, columns, x_scale, inverse.reciprocal(), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x_transposed, x_scale, weight, inverse = ctx.saved_tensors
        scale = scale_of(gradient, BACKWARD)
        d_x = None
        d_weight = None
        if x_transposed is None:
            by_rows = cast(gradient, scale, BACKWARD)
        else:
            by_rows, transposed = round_both(gradient, scale.reciprocal(), BACKWARD)
            d_weight = multiply(transposed, x_transposed.t(), scale, x_scale, gradient.dtype, ctx.fast)
        if ctx.needs_input_grad[0]:
            columns = round_transposed(weight, inverse, FORWARD).t()
            d_x = multiply(by_rows, columns, scale, inverse.reciprocal(), gradient.dtype, ctx.fast)
        return d_x, d_weight, None


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, fast: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.fast = fast
        ctx.save_for_backward(x, weight)
        return _by_rows(x, weight, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        d_x = _by_rows(gradient, weight.t(), gradient.dtype, ctx.fast) if ctx.needs_input_grad[0] else None
        d_weight = _by_rows(gradient.t(), x.t(), gradient.dtype, ctx.fast) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None


def _by_rows(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """left · rightᵀ with a scale for each row of both."""
    a = scale_of(left, FORWARD, rows=True)
    b = scale_of(right, FORWARD, rows=True)
    first = lengthened(cast(left, a, FORWARD))
    second = lengthened(cast(right, b, FORWARD))
    return multiply(first, second.t(), a, b.t(), dtype, fast)


def scale_of(x: torch.Tensor, kind: torch.dtype, rows: bool = False) -> torch.Tensor:
    """Returns the divisor that maps the largest value to the format's largest; in fp32, a scalar or a column."""
    return scale_for(largest_of(x, rows), kind)


def scale_for(largest: torch.Tensor, kind: torch.dtype = FORWARD) -> torch.Tensor:
    """Returns the scale of a tensor with this largest value."""
    return largest.clamp(min=TINY) / torch.finfo(kind).max


def largest_of(x: torch.Tensor, rows: bool = False) -> torch.Tensor:
    """Returns the largest magnitude in fp32, a scalar or a column."""
    low, high = x.aminmax(dim=1, keepdim=True) if rows else x.aminmax()
    return torch.maximum(high, -low).float()


def inverse_for(largest: torch.Tensor) -> torch.Tensor:
    """Returns the factor of a weight with this largest value; see [Note: one inverse].

    Rounded in its bits, because a compiler removes a cast to bf16 and back.
    """
    exact = torch.finfo(FORWARD).max / largest.clamp(min=TINY)
    return ((exact.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


def cast(x: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Returns x in units of its scale, rounded to 8 bits; contiguous by rows."""
    return rounded(x, scale.reciprocal(), kind)


def multiply(
    left: torch.Tensor, right: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """Returns left (by rows) · right (by columns), scaled back; `fast` accumulates with fewer bits."""
    if effective_device(left) == "cpu":  # torch's own product of scaled rows dies there on some shapes
        return ((left.float() @ right.float()) * a * b).to(dtype)
    return scaled_mm(left, right, a, b, out_dtype=dtype, use_fast_accum=fast)
