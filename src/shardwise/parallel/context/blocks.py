"""Blockwise attention that also returns the log-sum-exp of its scores, to merge blocks.

Two implementations. A flash kernel, where the mask is full or causal: in zigzag order, every block
of a row that is one document. Plain arithmetic in fp32 or fp64, for windows, packed documents,
softcaps and dropout. Both recompute the scores in backward, from the log-sum-exp of all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.compat.torch_private import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    flash_attention,
    flash_attention_backward,
)
from shardwise.core.effective_device import effective_device, stands_in
from shardwise.nn.attention.varlen import Scores
from shardwise.parallel.context.mask import VisibilityRule
from shardwise.parallel.context.split import SequenceLayout

QUERIES = 512  # per slice in plain arithmetic: scores take (rows, heads, QUERIES, keys)
KERNEL_HEAD = 256  # largest head size that the kernels support

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KeyPiece:
    """The queries and keys (halves, or all of them) between which anything is visible."""

    queries: slice
    keys: slice
    causal: bool  # queries and keys are the same tokens, under a causal mask
    unmasked: bool  # causality aside, every query sees every key
    key_rank: int


def piece_of(layout: SequenceLayout, rule: VisibilityRule, key_rank: int) -> KeyPiece | None:
    """The keys of a rank that this rank's queries may see, judged on the host; None for none."""
    half = layout.chunk
    query_chunks: tuple[int, ...] = layout.chunks(layout.rank)
    key_chunks: tuple[int, ...] = layout.chunks(key_rank)
    queries = keys = slice(0, layout.width)
    if rule.causal and key_rank != layout.rank:
        if key_chunks[0] > query_chunks[0]:
            queries = slice(half, layout.width)
            query_chunks = query_chunks[1:]
        if key_chunks[-1] > query_chunks[-1]:
            keys = slice(0, half)
            key_chunks = key_chunks[:1]
        if key_chunks[0] > query_chunks[-1]:
            return None
    if not layout.share(query_chunks, key_chunks):
        return None
    reach = rule.window if rule.causal else rule.sides
    if reach is not None and _least_distance(query_chunks, key_chunks, half) > reach:
        return None
    causal = rule.causal and key_rank == layout.rank
    unmasked = rule.plain and layout.one_document(query_chunks + key_chunks)
    return KeyPiece(queries, keys, causal, unmasked, key_rank)


def _least_distance(queries: tuple[int, ...], keys: tuple[int, ...], size: int) -> int:
    """The least distance of a token in one set of chunks from a token in the other."""
    apart = min(abs(a - b) for a in queries for b in keys)
    return 0 if apart == 0 else (apart - 1) * size + 1


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for accumulation: fp64 stays, everything else is fp32."""
    return dtype if dtype == torch.float64 else torch.float32


class AttentionBlock:
    """Attention of one piece; outputs and gradients have the dtype that `wide` gives."""

    def __init__(
        self,
        piece: KeyPiece,
        layout: SequenceLayout,
        rule: VisibilityRule,
        scores: Scores,
        seed: int,
    ) -> None:
        self.piece = piece
        self.layout = layout
        self.rule = rule
        self.scores = scores
        self.seed = seed
        self._state: list[Any] = []  # what a CUDA forward returns for its backward

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp for the piece's queries, keys and values."""
        if self._kernel_takes(q, k, v):
            return self._flash_forward(q, k, v)
        parts = [self._forward(part, k, v, start) for start, part in _in_parts(q)]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad: torch.Tensor,
    ) -> Grads:
        """Gradients of q, k and v; `out`, `lse` and `grad` are those of the merged blocks."""
        if self._kernel_takes(q, k, v):
            return self._flash_backward(q, k, v, out, lse, grad)
        grad = grad.to(wide(q.dtype))
        delta = (grad * out.to(grad.dtype)).sum(-1)
        dq: list[torch.Tensor] = []
        dk = torch.zeros_like(k, dtype=grad.dtype)
        dv = torch.zeros_like(v, dtype=grad.dtype)
        for start, part in _in_parts(q):
            at = slice(start, start + part.shape[2])
            part_dq, part_dk, part_dv = self._backward(
                part, k, v, lse[:, :, at], grad[:, :, at], delta[:, :, at], start
            )
            dq.append(part_dq)
            dk += part_dk
            dv += part_dv
        return torch.cat(dq, 2), dk, dv

    def _kernel_takes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        scores = self.scores
        head = q.shape[-1]
        simple = self.piece.unmasked and scores.softcap is None and scores.dropout == 0.0
        if not simple or head != v.shape[-1]:
            return False
        if effective_device(q) == "cpu":
            return True
        half = q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
        recent = stands_in() or (
            q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0)
        )
        return half and recent and head % 8 == 0 and head <= KERNEL_HEAD and not torch.version.hip

    def _flash_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = _repeated(k, q)
        v = _repeated(v, q)
        causal = self.piece.causal
        scale = self.scores.scale
        if q.device.type == "cpu":
            out, lse, *_ = cpu_flash_attention(q, k, v, 0.0, causal, scale=scale)
        else:
            results = flash_attention(q, k, v, 0.0, causal, False, scale=scale)
            out, lse, *self._state = results[:8]
        return out.to(wide(q.dtype)), lse[:, :, : q.shape[2]].to(wide(q.dtype))

    def _flash_backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad: torch.Tensor,
    ) -> Grads:
        inputs = (q, _repeated(k, q), _repeated(v, q))
        tensors = (grad.to(q.dtype), *inputs, out.to(q.dtype), lse.contiguous())
        causal = self.piece.causal
        scale = self.scores.scale
        if q.device.type == "cpu":
            dq, dk, dv = cpu_flash_attention_backward(*tensors, 0.0, causal, scale=scale)
        else:
            *lengths, seed, offset = self._state
            dq, dk, dv = flash_attention_backward(
                *tensors, *lengths, 0.0, causal, seed, offset, scale=scale
            )
        return dq.to(wide(q.dtype)), _summed(dk, k), _summed(dv, v)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, _ = self._scores(q, k, start)
        lse = scores.logsumexp(-1)
        weights = _weights(scores, lse)
        dropout = self._dropout_factors(scores, start)
        if dropout is not None:
            weights = weights * dropout
        return _by_heads(_grouped(weights, k) @ v.to(weights.dtype), q), lse

    def _backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        grad: torch.Tensor,
        delta: torch.Tensor,
        start: int,
    ) -> Grads:
        scores, slope = self._scores(q, k, start)
        weights = _weights(scores, lse)
        dropout = self._dropout_factors(scores, start)
        flat = _grouped(grad, k)
        dw = _by_heads(flat @ v.to(flat.dtype).transpose(-1, -2), q)
        dropped = weights
        if dropout is not None:
            dw = dw * dropout
            dropped = weights * dropout
        dv = _grouped(dropped, k).transpose(-1, -2) @ flat
        ds = weights * (dw - delta[..., None]) * self.scores.scale
        if slope is not None:
            ds = ds * slope
        ds = _grouped(ds, k)
        dq = _by_heads(ds @ k.to(ds.dtype), q)
        return dq, ds.transpose(-1, -2) @ _grouped(q, k).to(ds.dtype), dv

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores (rows, heads, queries, keys), -inf where masked, and a softcap's derivative."""
        dtype = wide(q.dtype)
        scores = _by_heads(_grouped(q, k).to(dtype) @ k.to(dtype).transpose(-1, -2), q)
        scores = scores * self.scores.scale
        slope = None
        cap = self.scores.softcap
        if cap is not None:
            tanh = torch.tanh(scores / cap)
            scores = tanh * cap
            slope = 1 - tanh * tanh
        visible = self._visible(start, q.shape[2], q.device)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return scores, slope

    def _visible(self, start: int, count: int, device: torch.device) -> torch.Tensor | None:
        """The mask (rows, 1, queries, keys) by documents and positions; None if all is visible."""
        layout = self.layout
        piece = self.piece
        if piece.unmasked and not piece.causal:
            return None
        documents = layout.on(device)
        begin = piece.queries.start + start

        def pair(full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            queries = layout.take(full)[:, begin : begin + count]
            keys = layout.take(full, piece.key_rank)[:, piece.keys]
            return queries[:, :, None], keys[:, None]

        query_documents, key_documents = pair(documents.index)
        visible = query_documents == key_documents
        by_rule = self.rule.sees(*pair(documents.positions))
        if by_rule is not None:
            visible = visible & by_rule
        return visible[:, None]

    def _dropout_factors(self, scores: torch.Tensor, start: int) -> torch.Tensor | None:
        """What dropout multiplies weights by; the same in forward and backward."""
        if self.scores.dropout == 0.0:
            return None
        random = torch.Generator(scores.device).manual_seed(
            hash((self.seed, self.piece.key_rank, start))
        )
        drawn = torch.rand(scores.shape, generator=random, device=scores.device)
        return (drawn >= self.scores.dropout).to(scores.dtype) / (1 - self.scores.dropout)


def block_of(
    layout: SequenceLayout, rule: VisibilityRule, scores: Scores, key_rank: int, seed: int = 0
) -> AttentionBlock | None:
    """Attention of this rank's queries to a rank's keys; None if none of them is visible."""
    piece = piece_of(layout, rule, key_rank)
    if piece is None:
        return None
    return AttentionBlock(piece, layout, rule, scores, seed)


def _in_parts(q: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(start, q[:, :, start : start + QUERIES]) for start in range(0, q.shape[2], QUERIES)]


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(rows, key heads, ..., any): the queries of heads that share a key head, concatenated."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _by_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.reshape(*q.shape[:3], x.shape[-1])


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Softmax weights; zero for a query that sees nothing."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two outputs, with their log-sum-exps, for the same queries."""
    total = torch.logaddexp(lse, other_lse)
    return out * _share(lse, total) + other * _share(other_lse, total), total


def _share(lse: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.exp(lse - total.masked_fill(total == float("-inf"), 0.0))[..., None]


def add_attention_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds attention sinks: one more score per head, with a value of zero."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    return out * _share(lse, total), total


def grad_of_sinks(
    sinks: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Gradient of the loss with respect to the sinks."""
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    gradient = -(weight * (grad.to(out.dtype) * out).sum(-1)).sum((0, 2))
    return gradient.to(sinks.dtype).view_as(sinks)


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if x.shape[1] == q.shape[1]:
        return x
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of `x` from the gradient of its repeated heads."""
    grad = grad.to(wide(grad.dtype))
    if grad.shape[1] != x.shape[1]:
        grad = grad.unflatten(1, (x.shape[1], -1)).sum(2)
    return grad
