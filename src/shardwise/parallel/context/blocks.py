"""Attention of some queries to some keys, with the log-sum-exp of its scores, so that results can be put together.

Two ways. A flash kernel, where every query sees every key, or those up to its own: what zigzag order leaves of a causal
mask as long as a row is one document. Plain arithmetic in single precision at least, for windows, packed documents,
softcaps and dropout. Both compute a block again in backward, from the log-sum-exp of all blocks together.
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

QUERIES = 512  # at a time in plain arithmetic: scores take (rows, heads, QUERIES, keys)
KERNEL_HEAD = 256  # the largest that the kernels take

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class KeyPiece:
    """What of one rank's keys a rank's queries can see at all: halves of both, or all."""

    queries: slice
    keys: slice
    causal: bool  # whether queries and keys are the same tokens, of which none sees a later one
    whole: bool  # nothing else is hidden
    key_rank: int


def piece_of(layout: SequenceLayout, rule: VisibilityRule, key_rank: int) -> KeyPiece | None:
    """What this rank's queries see of another's keys, as far as the host knows; None: nothing."""
    half, everything = layout.chunk, slice(0, layout.width)
    mine: tuple[int, ...] = layout.chunks(layout.rank)
    theirs: tuple[int, ...] = layout.chunks(key_rank)
    queries = keys = everything
    if rule.causal and key_rank != layout.rank:
        if theirs[0] > mine[0]:
            queries, mine = slice(half, layout.width), mine[1:]
        if theirs[-1] > mine[-1]:
            keys, theirs = slice(0, half), theirs[:1]
        if theirs[0] > mine[-1]:
            return None
    if not layout.share(mine, theirs):
        return None
    reach = rule.window if rule.causal else rule.sides
    if reach is not None and _nearest(mine, theirs, half) > reach:
        return None
    whole = rule.plain and layout.one_document(mine + theirs)
    return KeyPiece(queries, keys, rule.causal and key_rank == layout.rank, whole, key_rank)


def _nearest(mine: tuple[int, ...], theirs: tuple[int, ...], chunk: int) -> int:
    """At least so far is a token from any other, in chunks of this size."""
    return min(max(0, abs(a - b) - 1) * chunk + (a != b) for a in mine for b in theirs)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are held in."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


class AttentionBlock:
    """One piece: forward gives output and log-sum-exp, both wide; backward the gradients of q, k and v, wide."""

    def __init__(
        self,
        piece: KeyPiece,
        layout: SequenceLayout,
        rule: VisibilityRule,
        scores: Scores,
        seed: int,
    ) -> None:
        self.piece, self.layout, self.rule, self.scores, self.seed = (
            piece,
            layout,
            rule,
            scores,
            seed,
        )
        self._state: list[Any] = []  # what a CUDA kernel's backward wants to have back

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the piece's queries, keys and values."""
        if self._kernel_takes(q, k, v):
            out, lse, *self._state = _flash_forward(q, k, v, self.piece.causal, self.scores.scale)
            return out, lse
        parts = [self._forward(part, k, v, start) for start, part in _in_parts(q)]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor,
    ) -> Grads:  # fmt: skip
        """`out`, `lse` and `grad` are those of all blocks together."""
        if self._kernel_takes(q, k, v):
            return _flash_backward(
                q, k, v, out, lse, grad, self.piece.causal, self.scores.scale, self._state
            )
        grad = grad.to(wide(q.dtype))
        delta = (grad * out.to(grad.dtype)).sum(-1)
        found: list[torch.Tensor] = []
        dk, dv = torch.zeros_like(k, dtype=grad.dtype), torch.zeros_like(v, dtype=grad.dtype)
        for start, part in _in_parts(q):
            at = slice(start, start + part.shape[2])
            dq, more_k, more_v = self._backward(
                part, k, v, lse[:, :, at], grad[:, :, at], delta[:, :, at], start
            )
            found.append(dq)
            dk += more_k
            dv += more_v
        return torch.cat(found, 2), dk, dv

    def _kernel_takes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        scores, head = self.scores, q.shape[-1]
        simple = self.piece.whole and scores.softcap is None and scores.dropout == 0.0
        if not simple or head != v.shape[-1]:
            return False
        if effective_device(q) == "cpu":
            return True
        half = q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)
        recent = stands_in() or (
            q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (8, 0)
        )
        return half and recent and head % 8 == 0 and head <= KERNEL_HEAD and not torch.version.hip

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, _ = self._scores(q, k, start)
        lse = scores.logsumexp(-1)
        weights = _weights(scores, lse)
        if (kept := self._kept(scores, start)) is not None:
            weights = weights * kept
        return _by_heads(_grouped(weights, k) @ v.to(weights.dtype), q), lse

    def _backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        lse: torch.Tensor, grad: torch.Tensor, delta: torch.Tensor, start: int,
    ) -> Grads:  # fmt: skip
        scores, slope = self._scores(q, k, start)
        weights = _weights(scores, lse)
        kept = self._kept(scores, start)
        used = weights if kept is None else weights * kept
        flat = _grouped(grad, k)
        dv = _grouped(used, k).transpose(-1, -2) @ flat
        reward = _by_heads(flat @ v.to(flat.dtype).transpose(-1, -2), q)
        if kept is not None:
            reward = reward * kept
        ds = weights * (reward - delta[..., None]) * self.scores.scale
        if slope is not None:
            ds = ds * slope
        ds = _grouped(ds, k)
        dq = _by_heads(ds @ k.to(ds.dtype), q)
        return dq, ds.transpose(-1, -2) @ _grouped(q, k).to(ds.dtype), dv

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows, heads, queries, keys) with -inf where nothing is seen, and what a softcap makes of a gradient."""
        dtype = wide(q.dtype)
        scores = (
            _by_heads(_grouped(q, k).to(dtype) @ k.to(dtype).transpose(-1, -2), q)
            * self.scores.scale
        )
        slope = None
        if (cap := self.scores.softcap) is not None:
            bent = torch.tanh(scores / cap)
            scores, slope = bent * cap, 1 - bent * bent
        seen = self._seen(start, q.shape[2], q.device)
        return scores if seen is None else scores.masked_fill(~seen, float("-inf")), slope

    def _seen(self, start: int, count: int, device: torch.device) -> torch.Tensor | None:
        """(rows, 1, queries, keys), by documents and positions."""
        layout, piece = self.layout, self.piece
        if piece.whole and not piece.causal:
            return None
        documents = layout.on(device)
        begin = piece.queries.start + start
        mine, theirs = slice(begin, begin + count), piece.keys

        def pair(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            queries, keys = layout.take(whole), layout.take(whole, piece.key_rank)
            return queries[:, mine, None], keys[:, None, theirs]

        index, other = pair(documents.index)
        seen = index == other
        if (rule := self.rule.sees(*pair(documents.positions))) is not None:
            seen = seen & rule
        return seen[:, None]

    def _kept(self, scores: torch.Tensor, start: int) -> torch.Tensor | None:
        """What dropout multiplies weights by; the same again in backward."""
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
    """Attention to what a rank's keys have to tell this rank's queries; None where that is nothing."""
    piece = piece_of(layout, rule, key_rank)
    return None if piece is None else AttentionBlock(piece, layout, rule, scores, seed)


def _in_parts(q: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(start, q[:, :, start : start + QUERIES]) for start in range(0, q.shape[2], QUERIES)]


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(rows, heads, queries, any) with the queries of all heads that share a head of keys in line."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _by_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.reshape(*q.shape[:3], x.shape[-1])


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Zero for a query that sees nothing."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results for the same queries as one."""
    both = torch.logaddexp(lse, more_lse)
    return out * _share(lse, both) + more * _share(more_lse, both), both


def _share(lse: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.exp(lse - of.masked_fill(of == float("-inf"), 0.0))[..., None]


def sunk(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """With one more score per head, whose value is nothing."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    return out * _share(lse, both), both


def grad_of_sinks(
    sinks: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Of the loss by the sinks' scores."""
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    found = -(weight * (grad.to(out.dtype) * out).sum(-1)).sum((0, 2))
    return found.to(sinks.dtype).view_as(sinks)


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] != q.shape[1] else x


def _summed(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of repeated keys, as one of the keys."""
    grad = grad.to(wide(grad.dtype))
    return grad if grad.shape[1] == x.shape[1] else grad.unflatten(1, (x.shape[1], -1)).sum(2)


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> list[Any]:
    """Output, log-sum-exp, and what backward wants."""
    k, v = _repeated(k, q), _repeated(v, q)
    if q.device.type == "cpu":
        out, lse, *state = cpu_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        found = flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        out, lse, *state = found[:8]
    return [out.to(wide(q.dtype)), lse[:, :, : q.shape[2]].to(wide(q.dtype)), *state]


def _flash_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor, causal: bool, scale: float, state: list[Any],
) -> Grads:  # fmt: skip
    long_k, long_v = _repeated(k, q), _repeated(v, q)
    given = (grad.to(q.dtype), q, long_k, long_v, out.to(q.dtype), lse.contiguous())
    if q.device.type == "cpu":
        backward = cpu_flash_attention_backward
        dq, dk, dv = backward(*given, 0.0, causal, scale=scale)
    else:
        *lengths, seed, offset = state
        backward = flash_attention_backward
        dq, dk, dv = backward(*given, *lengths, 0.0, causal, seed, offset, scale=scale)
    return dq.to(wide(q.dtype)), _summed(dk, k), _summed(dv, v)
