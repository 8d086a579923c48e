"""W x + scale · B A x over a frozen W in fp8, multiplied in place, or in nf4, converted to fp8 on the fly.

Inputs are rounded to 8 bits with a scale for each row, the weight has one for each output. The product itself knows no
scales, which allows the fastest kernel; they are applied in the pass that adds the adapter's part anyway. In backward
the weight's scales lie along the dimension that is summed over, so they go into the gradient before that is rounded.
What is trained (A, B) is multiplied in 16 bits, with inputs and gradients that were not rounded.

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
    """Returns the layer's output for (tokens, in); `packed` has rows of RowFormat(columns, bits, double) per output."""
    out: torch.Tensor = _LoraFloat8.apply(x, packed, a, b, scale, columns, bits, double)
    return out if bias is None else out + bias


class _LoraFloat8(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, columns: int,
        bits: str, double: bool,
    ) -> torch.Tensor:  # fmt: skip
        low = x @ a.t()
        ctx.scale = scale
        ctx.form = (columns, bits, double)
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
        d_a = d_low.t() @ x
        d_b = gradient.t() @ low
        if scale != 1:
            d_b = d_b * scale
        d_x = None
        if ctx.needs_input_grad[0]:
            scaled_gradient = gradient * output_scales(packed, *ctx.form).to(gradient.dtype)
            rows = scale_of(scaled_gradient, FORWARD, rows=True)
            rounded = float8.cast(scaled_gradient, rows, FORWARD)
            d_x = float8_product(rounded, rows, packed, d_low, a.t(), 1.0, *ctx.form, True, gradient.dtype)
        return d_x, None, d_a, d_b, None, None, None, None


@torch.library.custom_op("shardwise::output_scales", mutates_args=())
def output_scales(packed: torch.Tensor, columns: int, bits: str, double: bool) -> torch.Tensor:
    """Returns the weight's scales, one for each output, in fp32."""
    return float8_scales(packed, RowFormat(columns, cast(Bits, bits), double)).flatten().clone()


@output_scales.register_fake
def _(packed: torch.Tensor, columns: int, bits: str, double: bool) -> torch.Tensor:
    return packed.new_empty(packed.shape[0], dtype=torch.float32)


@torch.library.custom_op("shardwise::lora_float8_product", mutates_args=())
def float8_product(
    left: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor, low: torch.Tensor, up: torch.Tensor, scale: float,
    columns: int, bits: str, double: bool, backward: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Returns left · W with the scales of both, plus scale · low upᵀ.

    `backward`: W sums over outputs, whose scales are already applied.
    """
    weight, scales = as_float8(packed, RowFormat(columns, cast(Bits, bits), double))
    right = transposed_bytes(weight).t() if backward else weight.t()
    unit_scale = _unit_scale(left.device)
    # without scales fp16 would overflow
    accumulate_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    y = multiply(left, right, unit_scale, unit_scale, accumulate_dtype, fast=True)
    return scale_and_add_low_rank_(y, rows, None if backward else scales, low, up, scale).to(dtype)


@functools.cache
def _unit_scale(device: torch.device) -> torch.Tensor:
    """Cached: filling it for each product would be one launch more."""
    return torch.ones((), device=device)


@float8_product.register_fake
def _(
    left: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor, low: torch.Tensor, up: torch.Tensor, scale: float,
    columns: int, bits: str, double: bool, backward: bool, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    return left.new_empty(left.shape[0], columns if backward else packed.shape[0], dtype=dtype)
