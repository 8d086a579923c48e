"""Ulysses attention: all-to-alls turn a part of the sequence into the full sequence of some heads.

Four all-to-alls surround ordinary attention, so any kernel for full rows works.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shardwise.nn.attention.document_mask import DocumentMask
from shardwise.nn.attention.varlen import Scores, attend_documents, largest_head
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.context.mask import ContextMask
from shardwise.parallel.context.ring import attend_whole
from shardwise.parallel.context.split import SequenceLayout

HEADS = 1  # dims of (rows, heads, width, head)
SEQUENCE = 2


class _Exchange(torch.autograd.Function):
    """Splits one dimension over the ranks and concatenates the other in rank order."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cut: int, joined: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = (joined, cut, group)
        leaving = torch.stack(x.chunk(dist.get_world_size(group), cut)).contiguous()
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=group)
        return torch.cat(arriving.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Exchange.apply(grad, *ctx.back), None, None, None


class Ulysses:
    """Attention of a sharded sequence in which each rank computes some heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        mask: ContextMask,
        plain: Any,
    ) -> torch.Tensor:
        """Implements `Attends`."""
        key, value = (repeat_heads(x, query.shape[1], self._ranks) for x in (key, value))
        q, k, v = (_Exchange.apply(x, HEADS, SEQUENCE, self._group) for x in (query, key, value))
        if scores.sinks is not None:
            local_sinks = scores.sinks.chunk(self._ranks)[dist.get_rank(self._group)]
            scores = replace(scores, sinks=local_sinks)
        by_heads = self._attend(q, k, v, scores, mask, plain)
        output: torch.Tensor = _Exchange.apply(by_heads, SEQUENCE, HEADS, self._group)
        return output

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        mask: ContextMask,
        plain: Any,
    ) -> torch.Tensor:
        """Attention of full rows, by nn/attention/varlen.py if it supports the rule."""
        layout = mask.layout
        rule = mask.rule
        supported = (
            scores.softcap is None
            and scores.sinks is None
            and rule.chunk is None
            and rule.sides is None
        )
        full = SequenceLayout(layout.on(q.device), layout.real, 1, 0, zigzag=False)
        if not supported or not (rule.causal or (rule.plain and layout.documents.alone)):
            return attend_whole(q, k, v, scores, full, rule)
        # Transformers' functions repeat keys by the module's ratio, which counts all heads.
        module: Any = SimpleNamespace(
            num_key_value_groups=q.shape[1] // k.shape[1], is_causal=rule.causal
        )
        options = {"dropout": scores.dropout, "scaling": scores.scale}
        if rule.causal:
            documents = DocumentMask(full.documents, rule.window, largest_head(q.device))
            out, _ = attend_documents(plain, module, q, k, v, documents, **options)
        else:
            out, _ = plain(module, q, k, v, attention_mask=None, is_causal=False, **options)
        return out.transpose(1, 2)


def check_heads(config: Any, ranks: int) -> None:
    """Refuses a config whose numbers of heads the first forward would refuse."""
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    if isinstance(queries, int) and isinstance(keys, int) and not _divides(queries, keys, ranks):
        raise CannotParallelize("", _cannot(queries, keys, ranks))


def repeat_heads(x: torch.Tensor, queries: int, ranks: int) -> torch.Tensor:
    """Keys or values, with heads repeated where there are fewer than ranks."""
    heads = x.shape[1]
    if not _divides(queries, heads, ranks):
        raise CannotParallelize("", _cannot(queries, heads, ranks))
    if heads % ranks == 0:
        return x
    return x.repeat_interleave(lcm(heads, ranks) // heads, 1)


def _cannot(queries: int, heads: int, ranks: int) -> str:
    legal = ", ".join(str(n) for n in range(1, queries + 1) if _divides(queries, heads, n))
    shape = f"{queries} heads over {heads} of keys"
    return f"{shape} cannot be shared by {ranks} ranks, but by {legal} (a ring by any)"


def _divides(queries: int, heads: int, ranks: int) -> bool:
    return queries % ranks == 0 and queries % lcm(heads, ranks) == 0
