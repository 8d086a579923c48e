"""Makes fake tensors take the GPU's kernels where the CPU runs several steps that save more for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.compat.hf_private import grouped_product_as
from shardwise.core.compat.torch_private import FakeTensor, safe_softmax


class _GroupedProduct(torch.autograd.Function):
    """Shapes of grouped matrix products: groups of rows with one matrix each."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(rows.shape[0], weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        rows, weight = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weight)


@contextmanager
def grouped_products() -> Iterator[None]:
    """Provides fake grouped products for other dtypes than bf16, the only one torch knows the shapes of."""
    from transformers.integrations import moe

    original: Any = moe._grouped_mm

    def grouped(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> Any:
        supported = weight.dtype == torch.bfloat16 or not isinstance(weight, FakeTensor)
        return original(input, weight, offs) if supported else _GroupedProduct.apply(input.to(weight.dtype), weight)

    moe._grouped_mm = grouped
    try:
        yield
    finally:
        moe._grouped_mm = original


@contextmanager
def gpu_kernels(device: str) -> Iterator[None]:
    """Saves a mask of one byte per element in dropout, and none in attention, whose kernels redraw it."""
    if device != "cuda":
        yield
        return
    attention = F.scaled_dot_product_attention
    dropout = F.dropout

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **others: Any) -> Any:
        if dropout_p > 0 and attn_mask is not None and attn_mask.requires_grad:  # no kernel takes a learned bias
            return _unfused_attention(query, key, value, attn_mask, dropout_p, **others)
        return attention(query, key, value, attn_mask, 0.0, **others)

    def drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or not 0 < p < 1 or inplace:
            return dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    F.dropout = drop
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention
        F.dropout = dropout


def _unfused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, dropout: float,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention as a GPU runs it without a fused kernel: in fp32, with all scores and a one-byte mask each saved."""
    assert not is_causal and not enable_gqa
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query.float() * root) @ (key.float() * root).transpose(-2, -1)
    weights = torch.native_dropout(safe_softmax(scores.add_(bias), -1), dropout, True)[0]
    return (weights @ value.float()).to(query.dtype)
