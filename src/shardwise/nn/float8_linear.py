"""Linear layers of a model's blocks that multiply in 8 bits while they train (nn/kernels/float8.py).

A layer keeps its name, its parameters and its class's other ways: it is given a subclass whose forward rounds.
Embeddings, norms, routers, experts in stacks and the head are no linear layers of a block and stay as they are; so do
narrow layers, which would gain less than rounding costs. Evaluated is the model that is handed over, in 16 bits.
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
from shardwise.nn.kernels.round_turned import MULTIPLE

if TYPE_CHECKING:
    from shardwise.config.schema import Fp8


class Float8(nn.Module):
    """What a linear layer in 8 bits is besides its own class."""

    float8_recipe: Recipe
    float8_fast: bool
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer's own; in training, rounded."""
        if not self.training:
            return super().forward(x)  # type: ignore[no-any-return]
        weight = self.weight.t() if is_transposed(self) else self.weight
        return float8_linear(x, weight, self.bias, self.float8_recipe, self.float8_fast)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8 {self.float8_recipe}".lstrip(", ")


def use_float8(model: nn.Module, blocks: list[tuple[str, nn.Module]], settings: Fp8) -> list[str]:
    """Turns the blocks' linear layers into ones that multiply in 8 bits, in place; returns their names."""
    if settings.recipe == "none":
        return []
    chosen: list[str] = []
    inside, kept = (
        tuple(f"{name}." for name, _ in blocks),
        find_targets(model, settings.modules_to_not_convert, "fp8.modules_to_not_convert"),
    )
    for name, module in linear_modules(model).items():
        sizes: Any = module.weight.shape
        wide = min(sizes) >= settings.min_features and not any(size % MULTIPLE for size in sizes)
        if wide and name.startswith(inside) and name not in kept:
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
            "lower fp8.min_features or shorten fp8.modules_to_not_convert, or use precision: bf16",
        )  # fmt: skip
    return chosen


@functools.cache
def _float8_class(own: type[nn.Module]) -> type[nn.Module]:
    return type(f"Float8{own.__name__}", (Float8, own), {})
