"""Causal attention with softcapped scores (Gemma 2) and attention sinks (gpt-oss), over packed documents.

PyTorch's fused attention knows neither, and eager attention holds a score for every pair of tokens. Here both are part
of a flash kernel: scores are capped as they are made, a sink is one more score of each head that has no value.

All rows of a batch are one line of tokens. A query sees the tokens of its own document from `starts` on (and at most
`window` of them, itself among them), so documents need no mask and rows no padding to a common length.

The formula stands here, in the kernel (softcap_triton.py), in varlen.py for CPUs, and in parallel/context/blocks.py for
sequences that are sharded; tests hold each to eager attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

UNLIMITED = 1 << 30  # a window that takes in every document


def attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of (tokens, heads, head); keys and values may have fewer heads, that divide those of queries.

    `starts`, `ends`: int32, of each token's document, the `longest` of which has so many tokens. Scores are
    `softcap * tanh(scale * q k / softcap)`.
    """
    cap = softcap or 0.0
    width = window or UNLIMITED
    out: torch.Tensor = capped_attention(query, key, value, sinks, starts, ends, longest, scale, cap, width)[0]
    return out


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Reference implementation in plain operations, in single precision at least.

    Without `starts` all tokens are one document. The kernel has no dropout.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(dtype).transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(query), device=query.device)
    first = position - ((window or UNLIMITED) - 1)
    first = first if starts is None else torch.maximum(starts.long(), first)
    scores = scores.masked_fill((position < first[:, None]) | (position > position[:, None]), float("-inf"))
    weights = softmax_with(scores[None], sinks, dropout)[0]
    return (weights @ v).transpose(0, 1).to(query.dtype)


def softmax_with(scores: torch.Tensor, sinks: torch.Tensor | None, dropout: float = 0.0) -> torch.Tensor:
    """Returns the weights of (rows, heads, queries, keys), with one more score per head that has no value."""
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink_scores = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1]
    return F.dropout(weights, dropout) if dropout else weights


@torch.library.custom_op("shardwise::capped_attention", mutates_args=())
def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, and the log-sum-exp of the scores, (heads, tokens); no softcap: 0."""
    from shardwise.nn.attention import softcap_triton as triton

    return triton.forward(query, key, value, sinks, starts, scale, softcap, window)


@capped_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _size = query.shape
    return query.new_empty(tokens, heads, value.shape[-1]), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("shardwise::capped_attention_backward", mutates_args=())
def capped_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    longest: int,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of queries, keys, values and sinks (empty if there are none)."""
    from shardwise.nn.attention import softcap_triton as triton

    delta = (gradient.float() * out.float()).sum(-1).t().contiguous()  # (heads, tokens)
    grads = triton.backward(gradient, query, key, value, starts, ends, sums, delta, scale, softcap, window)
    if sinks is None:
        return *grads, query.new_empty(0)
    # A sink has no value: all that its weight does is to take from the others.
    weight = torch.exp(sinks.float()[:, None] - sums)
    return *grads, -(weight * delta).sum(1).to(sinks.dtype)


@capped_attention_backward.register_fake
def _(gradient: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    query, key, value, sinks = given[:4]
    empty = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
    return *empty, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, sinks, starts, ends, *ctx.how = inputs
    ctx.save_for_backward(query, key, value, sinks, starts, ends, *output)
    ctx.mark_non_differentiable(output[1])


def _grad(ctx, gradient, _):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # asked for once: a block that is recomputed hands them out once
    *grads, of_sinks = capped_attention_backward(gradient, *saved, *ctx.how)
    return *grads, None if saved[3] is None else of_sinks, *(None for _ in range(6))


capped_attention.register_autograd(_grad, setup_context=_save)
