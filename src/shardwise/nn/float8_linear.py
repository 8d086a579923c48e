"""Linear layers of a model's blocks that multiply in fp8 while they train (nn/kernels/float8.py).

A layer keeps its name, its parameters and its class's other methods: it is given a subclass whose forward rounds.
Embeddings, norms, routers, stacked experts and the head are no linear layers of a block and are unchanged; so are
narrow layers, which would gain less than rounding costs. Evaluation uses the exported model, in 16 bits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardwise.core.errors import UserError
from shardwise.nn.adapters.layers import is_transposed
from shardwise.nn.adapters.targets import find_targets, linear_modules
from shardwise.nn.kernels.float8 import Recipe, float8_linear
from shardwise.nn.kernels.transposed_round import MULTIPLE

if TYPE_CHECKING:
    from shardwise.config.schema import Fp8


class Float8(nn.Module):
    """Mixin of a linear layer that computes in fp8."""

    float8_recipe: Recipe
    float8_fast: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's own forward; rounded to fp8 in training."""
        if not self.training:
            return super().forward(x)  # type: ignore[no-any-return]
        weight = self.weight.t() if is_transposed(self) else self.weight
        return float8_linear(x, weight, self.bias, self.float8_recipe, self.float8_fast)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8 {self.float8_recipe}".lstrip(", ")


def use_float8(model: nn.Module, blocks: list[tuple[str, nn.Module]], settings: Fp8) -> list[str]:
    """Converts the blocks' linear layers to fp8, in place; returns their names."""
    if settings.recipe == "none":
        return []
    chosen: list[str] = []
    block_prefixes = tuple(f"{name}." for name, _ in blocks)
    excluded = find_targets(model, settings.modules_to_not_convert, "fp8.modules_to_not_convert")
    for name, module in linear_modules(model).items():
        sizes: Any = module.weight.shape
        eligible = min(sizes) >= settings.min_features and not any(size % MULTIPLE for size in sizes)
        if eligible and name.startswith(block_prefixes) and name not in excluded:
            module.__class__ = _float8_class(cast(Any, type(module)))
            module.float8_recipe = settings.recipe  # type: ignore[assignment]
            module.float8_fast = settings.use_fast_accum  # type: ignore[assignment]
            chosen.append(name)
    if not chosen:
        raise UserError(
            "fp8",
            settings.recipe,
            f"no linear layer of a block has {settings.min_features} or more inputs and outputs, both multiples of "
            f"{MULTIPLE}",
            "lower advanced.fp8.min_features or shorten fp8.modules_to_not_convert, or use precision: bf16",
        )  # fmt: skip
    return chosen


@functools.cache
def _float8_class(layer_class: type[nn.Module]) -> type[nn.Module]:
    return type(f"Float8{layer_class.__name__}", (Float8, layer_class), {})
