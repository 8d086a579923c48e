"""The base of QLoRA: linear layers whose weights are quantised and dequantised, one layer at a time, to multiply.

The module stays what it was (its class becomes a subclass, so hooks, names and other subclasses hold), and so does the
name of its parameter; the parameter itself is a frozen int8 matrix of packed rows (nn/kernels/nf4.py). FSDP shards it
by rows like any other, never casts it, and whoever fills the model packs the rows of the file through `packings`. int8,
not uint8: some models compare a linear layer's dtype with the input's and know int8 as a packed one (T5).

Rows are those of the stored matrix: outputs of a Linear, inputs of transformers' Conv1D. Only linear layers and stacks
of experts are quantised: embeddings, norms, routers, the head and layers that share their weight stay floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.nn.adapters.packed_linear import packed_linear
from shardwise.nn.adapters.packing import WeightPacking, packed_parameter
from shardwise.nn.adapters.quantized_experts import is_experts, quantize_experts
from shardwise.nn.kernels.nf4 import Bits, RowFormat


class Quantized(nn.Module):
    """Mixin of a quantised linear layer."""

    transposed: bool  # whether the stored matrix has inputs for rows
    weight: nn.Parameter
    bias: nn.Parameter | None
    packings: dict[str, WeightPacking]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's own forward, with the dequantised weight."""
        form = self.packings["weight"].form
        y: torch.Tensor = packed_linear(x, self.weight, form.columns, form.bits, form.double, self.transposed)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        form = self.packings["weight"].form
        return f"{super().extra_repr()}, {form.bits}, {8 * form.row_bytes / form.columns:.2f} bits".lstrip(", ")


def quantize_linears(
    model: nn.Module, targets: Callable[[str, nn.Module], bool], bits: Bits = "nf4", double: bool = True
) -> list[str]:
    """Quantises the chosen linear layers and stacks of experts, in place; returns the layers' names.

    On `meta` nothing is computed; real weights are quantised.
    """
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    kinds = _linear_classes()
    chosen = []
    for name, module in model.named_modules():
        linear = type(module) in kinds
        experts = is_experts(module)
        if not (linear or experts) or module is head or not targets(name, module):
            continue
        if experts:
            quantize_experts(module, bits, double)
        elif owners[id(module.weight)] == 1:
            _quantize_linear(module, kinds[type(module)], bits, double)
            chosen.append(name)
    return chosen


def dequantized(module: nn.Module, dtype: torch.dtype = torch.float32, name: str = "weight") -> torch.Tensor:
    """Returns the weight that a quantised layer multiplies with, in its stored orientation; of a shard, the shard's."""
    weight = getattr(module, name).detach()
    packing = cast(Quantized, module).packings[name]
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


def _quantize_linear(module: Any, transposed: bool, bits: Bits, double: bool) -> None:
    packing = WeightPacking(module.weight.shape, RowFormat(module.weight.shape[1], bits, double))
    module.weight = packed_parameter(module.weight, packing)
    module.packings = {"weight": packing}
    module.__class__ = _quantized_class(cast(Any, type(module)), transposed)


@lru_cache
def _quantized_class(plain: type[nn.Module], transposed: bool) -> type[nn.Module]:
    return type(f"Quantized{plain.__name__}", (Quantized, plain), {"transposed": transposed})
