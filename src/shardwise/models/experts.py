"""Routed experts: rows sorted by expert, two grouped products, and no wait for the host.

transformers ask a registry how a stack of experts computes; this is an entry of it. Against the entry that they choose
themselves, copies of tokens are gathered and added up by the order and its inverse in both directions (a plain index's
backward scatters: it sorts again, and adds a row's copies one after the other), the router's weights are multiplied
into what lies between the two products (which is narrower than what comes out), and so neither the products' results
nor the sorted copies need be kept. All is plain torch: a compiled block fuses it with what stands around it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations import moe

from shardwise.adapters.quantized_experts import is_experts

NAME = "shardwise"


def use_grouped_experts(model: nn.Module) -> list[str]:
    """Lets a model's stacks of experts compute so, where transformers would group them too; returns their names."""
    stacks: dict[str, Any] = {name: module for name, module in model.named_modules() if is_experts(module)}
    chosen = {name: m for name, m in stacks.items() if m.config._experts_implementation in ("grouped_mm", NAME)}
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    for module in chosen.values():
        module.config._experts_implementation = NAME
    return list(chosen)


def grouped_experts(module: Any, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each row through its experts, mixed by their weights; `experts` and `weights` are rows × choices."""
    copies, chosen = experts.shape[-1], experts.reshape(-1)
    ordered, order = torch.sort(chosen, stable=True)
    numbers = torch.arange(module.num_experts, device=rows.device)
    ends = torch.searchsorted(ordered, numbers, right=True).to(torch.int32)
    places = torch.arange(len(order), device=rows.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    wide: Any = module.gate_up_proj if module.has_gate else module.up_proj

    inside = _product(_Spread.apply(rows, order, inverse, copies), wide, ends, module.is_transposed)
    if module.has_bias:
        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        inside = inside + _Pick.apply(bias, ordered)
    inside = module._apply_gate(inside) if module.has_gate else module.act_fn(inside)
    share = _Spread.apply(weights.reshape(-1, 1), order, inverse, 1)
    out = _product((inside * share).to(rows.dtype), module.down_proj, ends, module.is_transposed)
    if module.has_bias:
        out = out + (_Pick.apply(module.down_proj_bias, ordered) * share).to(out.dtype)
    mixed: torch.Tensor = _Gather.apply(out, order, inverse, copies)
    return mixed


def _product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, transposed: bool) -> torch.Tensor:
    product: torch.Tensor = moe._grouped_mm(rows, weight if transposed else weight.transpose(-2, -1), ends)
    return product


def _take(rows: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:
    return rows[order // copies if copies > 1 else order]


def _add_up(rows: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
    back = rows[inverse]
    return back.view(-1, copies, rows.shape[-1]).sum(1) if copies > 1 else back


class _Spread(torch.autograd.Function):
    """A row's copies, sorted: row `order[i] // copies` for each i."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return _take(rows, order, copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return _add_up(gradient, inverse, ctx.copies), None, None, None


class _Gather(torch.autograd.Function):
    """The sum of each row's copies, from sorted ones: `_Spread`'s backward, and the reverse."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, copies: int
    ) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _add_up(rows, inverse, copies)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        return _take(gradient, order, ctx.copies), None, None, None


class _Pick(torch.autograd.Function):
    """A row of a table for each number; backward adds up by a product, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(numbers)
        ctx.rows = len(table)
        return table[numbers]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (numbers,) = ctx.saved_tensors
        asked = numbers == torch.arange(ctx.rows, device=numbers.device)[:, None]
        return asked.to(gradient.dtype) @ gradient, None
