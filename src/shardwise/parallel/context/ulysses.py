"""Ulysses attention: a part of the sequence with all heads becomes all of the sequence with a part of the heads.

Four all-to-alls around ordinary attention: whatever kernel serves whole rows serves here.
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

HEADS, SEQUENCE = 1, 2


class _Exchange(torch.autograd.Function):
    """Cuts one dimension over the ranks and puts the other together, in the order of ranks."""

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
    """Attention of a divided sequence by whole heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, dist.get_world_size(group)

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
        """In the place of `Attends`."""
        key, value = (repeat_heads(x, query.shape[1], self._ranks) for x in (key, value))
        q, k, v = (_Exchange.apply(x, HEADS, SEQUENCE, self._group) for x in (query, key, value))
        if scores.sinks is not None:
            scores = replace(
                scores, sinks=scores.sinks.chunk(self._ranks)[dist.get_rank(self._group)]
            )
        found: torch.Tensor = _Exchange.apply(
            self._attend(q, k, v, scores, mask, plain), SEQUENCE, HEADS, self._group
        )
        return found

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scores: Scores,
        mask: ContextMask,
        plain: Any,
    ) -> torch.Tensor:
        """Of whole rows: by the kernels of nn/attention/varlen.py where they know the rule."""
        layout, rule = mask.layout, mask.rule
        usual = (
            scores.softcap is None
            and scores.sinks is None
            and rule.chunk is None
            and rule.sides is None
        )
        whole = SequenceLayout(layout.on(q.device), layout.real, 1, 0, zigzag=False)
        if not usual or not (rule.causal or (rule.plain and layout.documents.alone)):
            return attend_whole(q, k, v, scores, whole, rule)
        # transformers' functions repeat keys by what the module says, which knows all heads.
        module: Any = SimpleNamespace(
            num_key_value_groups=q.shape[1] // k.shape[1], is_causal=rule.causal
        )
        given = {"dropout": scores.dropout, "scaling": scores.scale}
        if rule.causal:
            documents = DocumentMask(whole.documents, rule.window, largest_head(q.device))
            out, _ = attend_documents(plain, module, q, k, v, documents, **given)
        else:
            out, _ = plain(module, q, k, v, attention_mask=None, is_causal=False, **given)
        return out.transpose(1, 2)


def check_heads(config: Any, ranks: int) -> None:
    """Refuses what would be refused in the first forward, by the numbers of heads that a config tells."""
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    if isinstance(queries, int) and isinstance(keys, int) and not _divides(queries, keys, ranks):
        raise CannotParallelize("", _cannot(queries, keys, ranks))


def repeat_heads(x: torch.Tensor, queries: int, ranks: int) -> torch.Tensor:
    """Keys or values with as many heads as the ranks can share: repeated where there are fewer than ranks."""
    heads = x.shape[1]
    if not _divides(queries, heads, ranks):
        raise CannotParallelize("", _cannot(queries, heads, ranks))
    return x.repeat_interleave(lcm(heads, ranks) // heads, 1) if heads % ranks else x


def _cannot(queries: int, heads: int, ranks: int) -> str:
    legal = ", ".join(str(n) for n in range(1, queries + 1) if _divides(queries, heads, n))
    return f"{queries} heads over {heads} of keys cannot be shared by {ranks} ranks, but by {legal} (a ring by any)"


def _divides(queries: int, heads: int, ranks: int) -> bool:
    return queries % ranks == 0 and queries % lcm(heads, ranks) == 0
