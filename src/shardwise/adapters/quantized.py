"""The base of QLoRA: linear layers whose weights are kept in few bits and come back, one layer at a time, to multiply.

The module stays what it was (its class becomes a subclass, so hooks, names and other subclasses hold), and so does the
name of its parameter; the parameter itself is a frozen int8 matrix of packed rows (kernels/nf4.py). FSDP divides it by
rows like any other, never casts it, and whoever fills the model packs the rows of the file through `packings`. int8,
not uint8: some models compare a linear layer's type with the input's and know int8 as a packed one (T5).

Rows are those of the stored matrix: outputs of a Linear, inputs of transformers' Conv1D. Quantised are linear layers
alone: embeddings, norms, the head, layers that share their weight and stacks of experts stay floats.

[Note: no copies] What backward needs is the packed weight, which FSDP frees and gathers again in between, so nothing of
a layer's full size outlives the multiplication. Forward and backward are two operators that nothing looks into: traced
as plain code, the compiler would see the same weight made twice and keep it from one to the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.kernels.nf4 import Bits, RowFormat, dequantize, quantize


@dataclass(frozen=True)
class Packing:
    """How one parameter is kept: the shape that files have, and the bytes of each row."""

    shape: torch.Size
    form: RowFormat

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of floats → rows of the parameter."""
        return quantize(rows.reshape(-1, self.form.columns), self.form).view(*rows.shape[:-1], -1)

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the parameter → rows of floats."""
        return dequantize(rows.reshape(-1, self.form.row_bytes), self.form, dtype).view(*rows.shape[:-1], -1)


class Quantized(nn.Module):
    """What a quantised linear layer is besides its own class."""

    transposed: bool  # whether the stored matrix has inputs for rows
    weight: nn.Parameter
    bias: nn.Parameter | None
    packings: dict[str, Packing]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer's own, with the weight as it comes back."""
        form = self.packings["weight"].form
        y: torch.Tensor = packed_linear(x, self.weight, form.columns, form.bits, form.double, self.transposed)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        form = self.packings["weight"].form
        return f"{super().extra_repr()}, {form.bits}, {8 * form.row_bytes / form.columns:.2f} bits".lstrip(", ")


def quantize_linears(
    model: nn.Module, targets: Callable[[str, nn.Module], bool], bits: Bits = "nf4", double: bool = True
) -> list[str]:
    """Turns the chosen linear layers of a model into quantised ones, in place; returns their names.

    On `meta` nothing is computed; real weights are quantised as they are.
    """
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    head, kinds, chosen = find_head(), _linear_classes(), []
    for name, module in model.named_modules():
        if type(module) not in kinds or module is head or not targets(name, module):
            continue
        if owners[id(module.weight)] == 1:
            _quantize_module(module, kinds[type(module)], bits, double)
            chosen.append(name)
    return chosen


def dequantized(module: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight that a quantised layer multiplies with, in its stored orientation; of a shard, the shard's."""
    quantised = cast(Quantized, module)
    weight, packing = quantised.weight.detach(), quantised.packings["weight"]
    if not isinstance(weight, DTensor):
        return packing.unpack(weight, dtype)
    local = packing.unpack(weight.to_local(), dtype)
    stride = torch.empty(packing.shape, device="meta").stride()
    options: dict[str, Any] = {"run_check": False, "shape": packing.shape, "stride": stride}
    return DTensor.from_local(local, weight.device_mesh, weight.placements, **options)


def _linear_classes() -> dict[type[nn.Module], bool]:
    """The classes that are quantised (subclasses may compute something else), and which of them are transposed."""
    from transformers.pytorch_utils import Conv1D

    return {nn.Linear: False, Conv1D: True}


def _quantize_module(module: Any, transposed: bool, bits: Bits, double: bool) -> None:
    weight = module.weight.detach()
    packing = Packing(weight.shape, RowFormat(weight.shape[1], bits, double))
    if weight.is_meta:
        packed = torch.empty(weight.shape[0], packing.form.row_bytes, dtype=torch.int8, device="meta")
    else:
        packed = packing.pack(weight)
    module.weight = nn.Parameter(packed, requires_grad=False)
    module.packings = {"weight": packing}
    module.__class__ = _quantized_class(cast(Any, type(module)), transposed)


@lru_cache
def _quantized_class(plain: type[nn.Module], transposed: bool) -> type[nn.Module]:
    return type(f"Quantized{plain.__name__}", (Quantized, plain), {"transposed": transposed})


@torch.library.custom_op("shardwise::packed_linear", mutates_args=())
def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, columns: int, bits: str, double: bool, transposed: bool
) -> torch.Tensor:
    """x times the weight, which has outputs for rows unless it is transposed."""
    weight = dequantize(packed, RowFormat(columns, cast(Bits, bits), double), x.dtype)
    return nn.functional.linear(x, weight.t() if transposed else weight)


@torch.library.custom_op("shardwise::packed_linear_backward", mutates_args=())
def packed_linear_backward(
    gradient: torch.Tensor, packed: torch.Tensor, columns: int, bits: str, double: bool, transposed: bool
) -> torch.Tensor:
    """The gradient of packed_linear's input."""
    weight = dequantize(packed, RowFormat(columns, cast(Bits, bits), double), gradient.dtype)
    return nn.functional.linear(gradient, weight if transposed else weight.t())


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
