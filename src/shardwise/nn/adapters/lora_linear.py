"""W x + scale · B A x as one operator, forward and backward, over a frozen weight, in floats or quantised.

Written as separate products, a compiler that knows no in-place updates copies each output once more before it adds to
it, and autograd makes a second gradient of the input to be added to the first. See also packed_linear's note: what
backward needs of the weight is the parameter itself, which FSDP frees and gathers again in between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.nn.adapters.packed_linear import unpacked
from shardwise.nn.kernels.low_rank import add_low_rank_

Tensors = tuple[torch.Tensor, torch.Tensor]
FLOATS = (0, "", False)  # of a weight that is not packed


@torch.library.custom_op("shardwise::lora_linear", mutates_args=())
def lora_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
    scale: float, transposed: bool, columns: int, bits: str, double: bool,
) -> Tensors:  # fmt: skip
    """Returns the layer's output for (tokens, in), and A x; columns, bits and double as in RowFormat, or FLOATS."""
    y = F.linear(x, _dense(weight, x.dtype, transposed, columns, bits, double), bias)
    low = F.linear(x, a)
    add_low_rank_(y, low, b, scale)
    return y, low


@torch.library.custom_op("shardwise::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    gradient: torch.Tensor, x: torch.Tensor, low: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    scale: float, transposed: bool, columns: int, bits: str, double: bool, needs_input: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the gradients of x (empty if not needed), A and B."""
    d_low = gradient @ b
    if scale != 1:
        d_low *= scale
    d_a = d_low.t() @ x
    d_b = gradient.t() @ low
    if scale != 1:
        d_b *= scale
    if not needs_input:
        return x.new_empty(0), d_a, d_b
    d_x = gradient @ _dense(weight, gradient.dtype, transposed, columns, bits, double)
    add_low_rank_(d_x, d_low, a.t(), 1.0)
    return d_x, d_a, d_b


def _dense(
    weight: torch.Tensor, dtype: torch.dtype, transposed: bool, columns: int, bits: str, double: bool
) -> torch.Tensor:
    """The weight as out × in."""
    if bits:
        return unpacked(weight, dtype, columns, bits, double, transposed)
    return weight.t() if transposed else weight


@lora_linear.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
    scale: float, transposed: bool, columns: int, bits: str, double: bool,
) -> Tensors:  # fmt: skip
    return x.new_empty(x.shape[0], b.shape[0]), x.new_empty(x.shape[0], a.shape[0])


@lora_linear_backward.register_fake
def _(
    gradient: torch.Tensor, x: torch.Tensor, low: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    scale: float, transposed: bool, columns: int, bits: str, double: bool, needs_input: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return x.new_empty(x.shape if needs_input else (0,)), a.new_empty(a.shape), b.new_empty(b.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    x, weight, _, a, b, *ctx.form = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], weight, a, b)


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[0]
    d_x, d_a, d_b = lora_linear_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.form, needed)
    return (d_x if needed else None), None, None, d_a, d_b, *(None for _ in ctx.form)


lora_linear.register_autograd(_backward, setup_context=_save)
