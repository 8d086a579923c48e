"""W x + scale · B A x over a frozen W in fp8, which is multiplied as it lies, or in nf4, which becomes fp8 in passing.

Inputs are rounded to 8 bits with a scale for each row, the weight has one for each output. The product itself knows no
scales, which lets the fastest kernel make it; they are applied in the pass that adds the adapter's part anyway. In
backward the weight's scales lie along the dimension that is summed over, so they go into the gradient before that is
rounded. What is learned (A, B) is multiplied in 16 bits, with inputs and gradients that were not rounded.

Rounding is plain torch outside of the operators, so that a compiled block fuses it with what comes before.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from shardwise.nn.kernels import float8
from shardwise.nn.kernels.float8 import FORWARD, multiply, scale_of
from shardwise.nn.kernels.low_rank import scale_and_add_low_rank_
from shardwise.nn.kernels.nf4 import Bits, RowFormat, as_float8, float8_scales
from shardwise.nn.kernels.transpose import transposed_bytes


def lora_float8(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float,
    columns: int, bits: str, double: bool,
) -> torch.Tensor:  # fmt: skip
    """The layer's output for (tokens, in); `packed` has rows of RowFormat(columns, bits, double) for each output."""
    out: torch.Tensor = _LoraFloat8.apply(x, packed, a, b, scale, columns, bits, double)
    return out if bias is None else out + bias


class _LoraFloat8(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, columns: int,
        bits: str, double: bool,
    ) -> torch.Tensor:  # fmt: skip
        low = x @ a.t()
        ctx.scale, ctx.form = scale, (columns, bits, double)
        ctx.save_for_backward(x, low, packed, a, b)
        rows = scale_of(x, FORWARD, rows=True)
        rounded = float8.cast(x, rows, FORWARD)
        out: torch.Tensor = float8_product(rounded, rows, packed, low, b, scale, *ctx.form, False, x.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, low, packed, a, b = ctx.saved_tensors
        scale = ctx.scale
        d_low = gradient @ b
        if scale != 1:
            d_low = d_low * scale
        d_a, d_b = d_low.t() @ x, gradient.t() @ low
        if scale != 1:
            d_b = d_b * scale
        d_x = None
        if ctx.needs_input_grad[0]:
            weighed = gradient * output_scales(packed, *ctx.form).to(gradient.dtype)
            rows = scale_of(weighed, FORWARD, rows=True)
            rounded = float8.cast(weighed, rows, FORWARD)
            d_x = float8_product(rounded, rows, packed, d_low, a.t(), 1.0, *ctx.form, True, gradient.dtype)
        return d_x, None, d_a, d_b, None, None, None, None


@torch.library.custom_op("shardwise::output_scales", mutates_args=())
def output_scales(packed: torch.Tensor, columns: int, bits: str, double: bool) -> torch.Tensor:
    """The weight's scales, one for each output, in fp32."""
    return float8_scales(packed, RowFormat(columns, cast(Bits, bits), double)).flatten().clone()


@output_scales.register_fake
def _(packed: torch.Tensor, columns: int, bits: str, double: bool) -> torch.Tensor:
    return packed.new_empty(packed.shape[0], dtype=torch.float32)


@torch.library.custom_op("shardwise::lora_float8_product", mutates_args=())
def float8_product(
    left: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor, low: torch.Tensor, up: torch.Tensor, scale: float,
    columns: int, bits: str, double: bool, backward: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """left · W with the scales of both, plus scale · low upᵀ; `backward`: W sums over outputs, whose scales are in."""
    weight, scales = as_float8(packed, RowFormat(columns, cast(Bits, bits), double))
    right = transposed_bytes(weight).t() if backward else weight.t()
    one = _one(left.device)
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # without scales fp16 would overflow
    y = multiply(left, right, one, one, wide, fast=True)
    return scale_and_add_low_rank_(y, rows, None if backward else scales, low, up, scale).to(dtype)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    """Made once: filling it anew for each product would be a launch more."""
    return torch.ones((), device=device)


@float8_product.register_fake
def _(
    left: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor, low: torch.Tensor, up: torch.Tensor, scale: float,
    columns: int, bits: str, double: bool, backward: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return left.new_empty(left.shape[0], columns if backward else packed.shape[0], dtype=dtype)
