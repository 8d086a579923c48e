"""Routed experts: rows sorted by expert, two grouped products, and no host synchronisation.

transformers has a registry of how a stack of experts computes; this is an entry of it. Compared with transformers' own
entry, copies of tokens are gathered and summed by the order and its inverse in both directions (a plain index's
backward scatters: it sorts again, and adds a row's copies one after the other), the router's weights are multiplied
into what lies between the two products (which is narrower than the output), and of the sorted copies, their products
and their mixtures only the result of the first product is saved for backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.core.compat.hf_private import apply_gate, experts_of, set_experts_of
from shardwise.nn.adapters.quantized_experts import is_experts
from shardwise.nn.kernels.grouped import grouped_product
from shardwise.nn.kernels.rows import copied_again, copied_rows, summed_rows

NAME = "shardwise"


def use_grouped_experts(model: nn.Module) -> list[str]:
    """Makes a model's stacks of experts use this, where transformers would group them too; returns their names."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    stacks: dict[str, Any] = {name: module for name, module in model.named_modules() if is_experts(module)}
    chosen = {name: m for name, m in stacks.items() if experts_of(m.config) in ("grouped_mm", NAME)}
    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    for module in chosen.values():
        set_experts_of(module.config, NAME)
    return list(chosen)


def grouped_experts(module: Any, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns each row through its experts, mixed by their weights; `experts` and `weights` are rows × choices."""
    copies = experts.shape[-1]
    chosen = experts.reshape(-1)
    ordered, order = torch.sort(chosen, stable=True)
    numbers = torch.arange(module.num_experts, device=rows.device)
    ends = torch.searchsorted(ordered, numbers, right=True).to(torch.int32)
    positions = torch.arange(len(order), device=rows.device)
    inverse = torch.empty_like(order).scatter_(0, order, positions)
    up_weight: Any = module.gate_up_proj if module.has_gate else module.up_proj
    down_weight: Any = module.down_proj
    if not module.is_transposed:
        up_weight = up_weight.transpose(-2, -1)
        down_weight = down_weight.transpose(-2, -1)

    hidden: Any = _FirstProduct.apply(rows.to(up_weight.dtype), up_weight, order, inverse, ends, copies)
    if module.has_bias:
        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        hidden = hidden + _Pick.apply(bias, ordered)
    hidden = apply_gate(module, hidden) if module.has_gate else module.act_fn(hidden)
    mixing_weight = _Permute.apply(weights.reshape(-1), order, inverse)[:, None]
    out: Any = _Product.apply((hidden * mixing_weight).to(down_weight.dtype), down_weight, ends)
    if module.has_bias:
        out = out + (_Pick.apply(module.down_proj_bias, ordered) * mixing_weight).to(out.dtype)
    mixed: torch.Tensor = _Mix.apply(out, order, inverse, copies)
    return mixed.to(rows.dtype)


class _FirstProduct(torch.autograd.Function):
    """Each row's copies, sorted, by the matrices of their experts; the copies are recomputed in backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor,
        ends: torch.Tensor, copies: int,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(rows, weight, order, inverse, ends)
        ctx.copies = copies
        return grouped_product(copied_rows(rows, order, copies), weight, ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, weight, order, inverse, ends = ctx.saved_tensors
        d_rows = d_weight = None
        if ctx.needs_input_grad[0]:
            d_rows = summed_rows(_of_rows(gradient, weight, ends), inverse, ctx.copies)
        if ctx.needs_input_grad[1]:
            d_weight = _of_weight(copied_again(rows, order, ctx.copies), gradient, weight, ends)
        return d_rows, d_weight, None, None, None, None


class _Product(torch.autograd.Function):
    """Sorted rows by the matrices of their experts."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.save_for_backward(rows, weight, ends)
        return grouped_product(rows, weight, ends)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        rows, weight, ends = ctx.saved_tensors
        d_rows = _of_rows(gradient, weight, ends) if ctx.needs_input_grad[0] else None
        return d_rows, _of_weight(rows, gradient, weight, ends) if ctx.needs_input_grad[1] else None, None


def _of_rows(gradient: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Any:
    return grouped_product(gradient.contiguous(), weight.transpose(-2, -1), ends)


def _of_weight(rows: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Any:
    """In the memory layout of the weight."""
    if weight.stride(-1) == 1:
        return grouped_product(rows.t(), gradient.contiguous(), ends)
    return grouped_product(gradient.contiguous().t(), rows, ends).transpose(-2, -1)


class _Mix(torch.autograd.Function):
    """The sum of each row's copies, from sorted ones."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int) -> Any:  # type: ignore[override]
        ctx.save_for_backward(order)
        ctx.copies = copies
        return summed_rows(rows, inverse, copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return copied_rows(gradient.contiguous(), order, ctx.copies), None, None, None


class _Permute(torch.autograd.Function):
    """Values in another order."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(inverse)
        return values[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return gradient[inverse], None, None


class _Pick(torch.autograd.Function):
    """A row of a table for each index; backward sums by a product, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(numbers)
        ctx.rows = len(table)
        return table[numbers]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (numbers,) = ctx.saved_tensors
        one_hot = numbers == torch.arange(ctx.rows, device=numbers.device)[:, None]
        return one_hot.to(gradient.dtype) @ gradient, None
