"""Ring attention: keys and values travel around the ranks, and partial results are merged.

Communication overlaps computation: the next keys arrive while a rank attends to the current ones.
Memory is that of a rank's own part: backward saves only queries, keys, values, output and
log-sum-exp, and sends the keys around again. Gradients of keys and values follow one step behind,
and each rank adds its own, until they return to their owner.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.distributed.shared_gpu import goes_by_host
from shardwise.nn.attention.varlen import Scores
from shardwise.parallel.context.blocks import (
    add_attention_sinks,
    block_of,
    grad_of_sinks,
    merge,
    wide,
)
from shardwise.parallel.context.mask import ContextMask, VisibilityRule
from shardwise.parallel.context.split import SequenceLayout

# Tags: both kinds are in flight at the same time.
KEYS = 0
GRADIENTS = 1


class RingWire:
    """Sends buffers to the next rank of a group and receives those of the previous one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group) if group else 1
        self.rank = dist.get_rank(group) if group else 0

    def start(self, buffer: torch.Tensor, tag: int) -> Arriving:
        """Starts sending a buffer and receiving one of the same shape."""
        assert self.group is not None
        after = dist.get_global_rank(self.group, (self.rank + 1) % self.ranks)
        before = dist.get_global_rank(self.group, (self.rank - 1) % self.ranks)
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
    """A transfer in flight: neither of its buffers may be used before `wait`."""

    def __init__(
        self, leaving: torch.Tensor, arriving: torch.Tensor, works: list[Any], device: torch.device
    ) -> None:
        self._leaving = leaving  # must outlive the transfer
        self._arriving = arriving
        self._works = works
        self._device = device

    def wait(self) -> torch.Tensor:
        """The received buffer, on the device."""
        for work in self._works:
            work.wait()
        return self._arriving.to(self._device)


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(
    buffer: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a buffer in the shapes of keys and values."""
    keys, values = buffer.split([k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scores: Scores,
        layout: SequenceLayout,
        rule: VisibilityRule,
        wire: RingWire,
    ) -> torch.Tensor:
        # Drawn from the generator of torch's own dropout: a recomputed block draws the same.
        seed = int(torch.randint(2**62, ())) if scores.dropout else 0
        shape = q.shape[:3]
        dtype = wide(q.dtype)
        out = torch.zeros(*shape, v.shape[-1], dtype=dtype, device=q.device)
        lse = torch.full(shape, float("-inf"), dtype=dtype, device=q.device)
        ctx.blocks = []
        current = (k, v)
        arriving: Arriving | None = None
        for step in range(wire.ranks):
            if arriving is not None:
                current = _unpacked(arriving.wait(), k, v)
            if step < wire.ranks - 1:
                arriving = wire.start(_packed(*current), KEYS)
            block = block_of(layout, rule, scores, (wire.rank - step) % wire.ranks, seed)
            ctx.blocks.append(block)
            if block is not None:
                queries = block.piece.queries
                visible = (x[:, :, block.piece.keys] for x in current)
                partial = block.forward(q[:, :, queries], *visible)
                out[:, :, queries], lse[:, :, queries] = merge(
                    out[:, :, queries], lse[:, :, queries], *partial
                )
        if sinks is not None:
            out, lse = add_attention_sinks(out, lse, sinks)
        ctx.wire = wire
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse, *([] if sinks is None else [sinks]))
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, out, lse, *sinks = ctx.saved_tensors
        wire = ctx.wire
        dtype = wide(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        current = (k, v)
        arriving: Arriving | None = None
        own: torch.Tensor | None = None  # gradient of this rank's keys from its own queries
        # Gradient of the current keys from the queries of the ranks that they passed.
        following: Arriving | None = None
        for step in range(wire.ranks):
            if arriving is not None:
                current = _unpacked(arriving.wait(), k, v)
            if step < wire.ranks - 1:
                arriving = wire.start(_packed(*current), KEYS)
            total = torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)
            if (block := ctx.blocks[step]) is not None:
                queries = block.piece.queries
                keys, values = (x[:, :, block.piece.keys] for x in current)
                results = (x[:, :, queries] for x in (out, lse, grad))
                block_dq, *block_dkv = block.backward(q[:, :, queries], keys, values, *results)
                dq[:, :, queries] += block_dq
                for full, part in zip(_unpacked(total, k, v), block_dkv, strict=True):
                    full[:, :, block.piece.keys] = part
            if step == 0:
                own = total
                continue
            if following is not None:
                total += following.wait()
            following = wire.start(total, GRADIENTS)
        assert own is not None
        if following is not None:
            own += following.wait()
        dk, dv = _unpacked(own, k, v)
        ds = grad_of_sinks(sinks[0], out.to(dtype), lse, grad) if sinks else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), ds, None, None, None, None


class Ring:
    """Attention of a sharded sequence over a ring of ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._wire = RingWire(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # nothing fuses across sends
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
        settings = (scores.sinks, scores, mask.layout, mask.rule, self._wire)
        output: torch.Tensor = _Ring.apply(query, key, value, *settings)
        return output


def attend_whole(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    layout: SequenceLayout,
    rule: VisibilityRule,
) -> torch.Tensor:
    """The same computation where one rank has the full sequence."""
    settings = (scores.sinks, scores, layout, rule, RingWire(None))
    output: torch.Tensor = _Ring.apply(query, key, value, *settings)
    return output
