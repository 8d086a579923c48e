"""Quantised stacks of experts: each expert's matrix is dequantised for its own tokens, never the full stack.

Models of transformers store the experts of a layer as 3-D parameters and publish that they do (`config`'s experts
implementation). Of their implementations only the model's own loop multiplies expert by expert, so that one is chosen.
It indexes the stack and multiplies; what it gets from a quantised stack is an object that knows how.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.core.compat.hf_private import is_config, set_experts_of
from shardwise.nn.adapters.packed_linear import packed_linear
from shardwise.nn.adapters.packing import WeightPacking, packed_parameter
from shardwise.nn.kernels.nf4 import Bits, RowFormat


class _Expert:
    """One expert's packed matrix, for the two products that models use: linear(x, w) and x @ w."""

    def __init__(self, packed: torch.Tensor, form: RowFormat) -> None:
        self._packed = packed
        self._form = form

    def float(self) -> _Expert:
        return self  # the product is in the type of its input

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        x, expert = args
        plain = function is nn.functional.linear
        assert plain or function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), function
        form = expert._form
        product: torch.Tensor = packed_linear(x, expert._packed, form.columns, form.bits, form.double, not plain)
        return product


class _Stack:
    def __init__(self, packed: torch.Tensor, form: RowFormat) -> None:
        self._packed = packed
        self._form = form

    def __getitem__(self, index: Any) -> _Expert:
        return _Expert(self._packed[index], self._form)


class QuantizedExperts(nn.Module):
    """Mixin of a quantised stack of experts."""

    packings: dict[str, WeightPacking]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, with stacks in place of the parameters."""
        stacks = {name: _Stack(getattr(self, name), packing.form) for name, packing in self.packings.items()}
        self.__dict__.update(stacks)  # before the parameters, where Python looks first
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in stacks:
                del self.__dict__[name]


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a stack of experts whose implementation can be chosen."""
    configurable = hasattr(module, "is_transposed") and is_config(getattr(module, "config", None))
    return configurable and any(p.ndim == 3 for p in module.parameters(recurse=False))


def quantize_experts(module: Any, bits: Bits, double: bool) -> None:
    """Quantises a stack of experts, in place."""
    module.packings = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.ndim == 3:
            packing = WeightPacking(parameter.shape, RowFormat(parameter.shape[-1], bits, double))
            setattr(module, name, packed_parameter(parameter, packing))
            module.packings[name] = packing
    set_experts_of(module.config, "eager")
    base_class = type(module)
    module.__class__ = type(f"Quantized{base_class.__name__}", (QuantizedExperts, base_class), {})
