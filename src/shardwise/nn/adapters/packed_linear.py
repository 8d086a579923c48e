"""The product of an input and a quantised weight, and its gradient.

[Note: no copies] What backward needs is the packed weight, which FSDP frees and gathers again in between, so nothing of
a layer's full size outlives the multiplication. Forward and backward are two opaque operators: traced as plain code,
the compiler would see the same weight made twice and save it from one to the other.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from shardwise.nn.kernels.nf4 import Bits, RowFormat, dequantize


def unpacked(
    packed: torch.Tensor, dtype: torch.dtype, columns: int, bits: str, double: bool, transposed: bool
) -> torch.Tensor:
    """Returns the weight as out × in; columns, bits and double as in RowFormat."""
    weight = dequantize(packed, RowFormat(columns, cast(Bits, bits), double), dtype)
    return weight.t() if transposed else weight


@torch.library.custom_op("shardwise::packed_linear", mutates_args=())
def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, columns: int, bits: str, double: bool, transposed: bool
) -> torch.Tensor:
    """Returns x times the weight, whose rows are outputs unless it is transposed."""
    return nn.functional.linear(x, unpacked(packed, x.dtype, columns, bits, double, transposed))


@torch.library.custom_op("shardwise::packed_linear_backward", mutates_args=())
def packed_linear_backward(
    gradient: torch.Tensor, packed: torch.Tensor, columns: int, bits: str, double: bool, transposed: bool
) -> torch.Tensor:
    """Returns the gradient of packed_linear's input."""
    return nn.functional.linear(gradient, unpacked(packed, gradient.dtype, columns, bits, double, transposed).t())


@packed_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, columns: int, bits: str, double: bool, transposed: bool) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], columns if transposed else packed.shape[0])


@packed_linear_backward.register_fake
def _(
    gradient: torch.Tensor, packed: torch.Tensor, columns: int, bits: str, double: bool, transposed: bool
) -> torch.Tensor:
    return gradient.new_empty(*gradient.shape[:-1], packed.shape[0] if transposed else columns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, packed, *ctx.form = inputs
    ctx.save_for_backward(packed)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (packed,) = ctx.saved_tensors
    return packed_linear_backward(gradient, packed, *ctx.form), None, None, None, None, None


packed_linear.register_autograd(_backward, setup_context=_save)
