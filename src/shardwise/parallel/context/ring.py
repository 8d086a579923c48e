"""Ring attention: keys and values go round, each rank attends to what passes, and the results are put together.

While a rank computes with the keys it has, the next ones are on their way. Memory is that of a rank's own part: nothing
is kept for backward but queries, keys, values, output and log-sum-exp, and the keys go round once more; the gradients
of keys and values follow one step behind, each rank adding its own, until they are home.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.distributed.shared_gpu import goes_by_host
from shardwise.nn.attention.varlen import Scores
from shardwise.parallel.context.blocks import block_of, grad_of_sinks, merge, sunk, wide
from shardwise.parallel.context.mask import ContextMask, VisibilityRule
from shardwise.parallel.context.split import SequenceLayout

KEYS, GRADIENTS = 0, 1  # tags: both are under way at the same time


class RingWire:
    """Passes buffers to the next rank of a group and takes those of the one before."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group) if group else 1
        self.rank = dist.get_rank(group) if group else 0

    def start(self, buffer: torch.Tensor, tag: int) -> Arriving:
        """Sends a buffer on its way; what arrives has the same shape."""
        assert self.group is not None
        after, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.ranks)
            for step in (1, self.ranks - 1)
        )
        leaving = buffer.cpu() if goes_by_host(self.group) else buffer
        arriving = torch.empty_like(leaving)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, leaving, after, self.group, tag),
                dist.P2POp(dist.irecv, arriving, before, self.group, tag),
            ]
        )
        return Arriving(leaving, arriving, works, buffer.device)


class Arriving:
    """A buffer on its way here, and the one that is leaving: neither may be touched before it has been waited for."""

    def __init__(
        self, leaving: torch.Tensor, arriving: torch.Tensor, works: list[Any], device: torch.device
    ) -> None:
        self._leaving, self._arriving, self._works, self._device = leaving, arriving, works, device

    def wait(self) -> torch.Tensor:
        """What has arrived."""
        for work in self._works:
            work.wait()
        return self._arriving.to(self._device)


def _together(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _apart(
    buffer: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a buffer in the shapes of keys and values."""
    keys, values = buffer.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
        scores: Scores, layout: SequenceLayout, rule: VisibilityRule, wire: RingWire,
    ) -> torch.Tensor:  # fmt: skip
        # The seed is drawn where torch's own dropout draws: a block computed again draws the same.
        seed = int(torch.randint(2**62, ())) if scores.dropout else 0
        shape, dtype = q.shape[:3], wide(q.dtype)
        out = torch.zeros(*shape, v.shape[-1], dtype=dtype, device=q.device)
        lse = torch.full(shape, float("-inf"), dtype=dtype, device=q.device)
        ctx.blocks = []
        passing, arriving = (k, v), None
        for step in range(wire.ranks):
            if arriving is not None:
                passing = _apart(arriving.wait(), k, v)
            if step < wire.ranks - 1:
                arriving = wire.start(_together(*passing), KEYS)
            block = block_of(layout, rule, scores, (wire.rank - step) % wire.ranks, seed)
            ctx.blocks.append(block)
            if block is not None:
                mine, theirs = block.piece.queries, block.piece.keys
                found = block.forward(q[:, :, mine], *(x[:, :, theirs] for x in passing))
                out[:, :, mine], lse[:, :, mine] = merge(out[:, :, mine], lse[:, :, mine], *found)
        if sinks is not None:
            out, lse = sunk(out, lse, sinks)
        ctx.wire = wire
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse, *([] if sinks is None else [sinks]))
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        wire = ctx.wire
        dtype = wide(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        passing, arriving = (k, v), None
        own: torch.Tensor | None = None  # of this rank's keys by its own queries
        following: Arriving | None = (
            None  # of the keys that are passing, by the ranks they passed before
        )
        for step in range(wire.ranks):
            if arriving is not None:
                passing = _apart(arriving.wait(), k, v)
            if step < wire.ranks - 1:
                arriving = wire.start(_together(*passing), KEYS)
            total = torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)
            if (block := ctx.blocks[step]) is not None:
                mine, theirs = block.piece.queries, block.piece.keys
                keys, values = (x[:, :, theirs] for x in passing)
                given = (x[:, :, mine] for x in (out, lse, grad))
                more_q, *more = block.backward(q[:, :, mine], keys, values, *given)
                dq[:, :, mine] += more_q
                for whole, part in zip(_apart(total, k, v), more, strict=True):
                    whole[:, :, theirs] = part
            if step == 0:
                own = total
                continue
            if following is not None:
                total += following.wait()
            following = wire.start(total, GRADIENTS)
        assert own is not None
        if following is not None:
            own += following.wait()
        dk, dv = _apart(own, k, v)
        ds = grad_of_sinks(sinks[0], out.to(dtype), lse, grad) if sinks else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), ds, None, None, None, None


class Ring:
    """Attention of a divided sequence by a ring of ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._wire = RingWire(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # nothing can be fused across the wire
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
        given = (scores.sinks, scores, mask.layout, mask.rule, self._wire)
        found: torch.Tensor = _Ring.apply(query, key, value, *given)
        return found


def attend_whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    layout: SequenceLayout,
    rule: VisibilityRule,
) -> torch.Tensor:
    """The same where one rank has all of the sequence."""
    found: torch.Tensor = _Ring.apply(
        query, key, value, scores.sinks, scores, layout, rule, RingWire(None)
    )
    return found
