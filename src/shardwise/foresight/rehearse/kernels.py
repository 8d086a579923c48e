"""Where a GPU has one kernel and a CPU several steps that keep more for backward: fake tensors take the GPU's way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.compat.hf_private import grouped_product_as
from shardwise.core.compat.torch_private import FakeTensor, safe_softmax


class _GroupedProduct(torch.autograd.Function):
    """The shapes of products of groups of rows with a matrix each."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(rows.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight)


def grouped_products() -> AbstractContextManager[None]:
    """torch knows the shapes of grouped products in bf16 alone: those of other types are told here."""

    def change(own: Any) -> Any:
        def grouped(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
            known = weight.dtype == torch.bfloat16 or not isinstance(weight, FakeTensor)
            return own(input, weight, offs) if known else _GroupedProduct.apply(input.to(weight.dtype), weight)

        return grouped

    return grouped_product_as(change)


@contextmanager
def gpu_kernels(device: str) -> Iterator[None]:
    """Dropout keeps a mask of one byte per element, and none in attention, whose kernels draw it again."""
    if device != "cuda":
        yield
        return
    attention, dropout = F.scaled_dot_product_attention, F.dropout

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **others: Any) -> Any:
        if dropout_p > 0 and attn_mask is not None and attn_mask.requires_grad:  # no kernel takes a learned bias
            return _in_steps(query, key, value, attn_mask, dropout_p, **others)
        return attention(query, key, value, attn_mask, 0.0, **others)

    def drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or not 0 < p < 1 or inplace:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    F.scaled_dot_product_attention, F.dropout = attend, drop  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = attention, dropout


def _in_steps(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, dropout: float,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention as a GPU does it without a kernel: in fp32, every score kept, and a mask of one byte for each."""
    assert not is_causal and not enable_gqa
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query.float() * root) @ (key.float() * root).transpose(-2, -1)
    weights = torch.native_dropout(safe_softmax(scores.add_(bias), -1), dropout, True)[0]
    return (weights @ value.float()).to(query.dtype)
