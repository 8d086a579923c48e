"""Sends rows to the ranks of their experts and back: an all-to-all each way and one host sync.

Create a `TokenExchange` from each row's expert, send rows `out`, apply the local experts to what
arrives, and bring the results `back` into the original order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.effective_device import table_of


class _AllToAll(torch.autograd.Function):
    """All-to-all of uneven numbers of rows; gradients travel in the reverse direction."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = (received, sent, group)
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _AllToAll.apply(gradient, *ctx.back), None, None, None


class _Take(torch.autograd.Function):
    """Row `order[i] // copies` for each i; backward sums copies in a fixed order (no atomics)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(order)
        ctx.shape = rows.shape
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        count, width = ctx.shape
        by_copy = gradient.new_zeros(count * ctx.copies, width)
        by_copy[order] = gradient
        return by_copy.view(count, ctx.copies, width).sum(1), None, None


class TokenExchange:
    """Where each row of a batch goes, by the number of its expert; every rank has as many experts.

    A row whose number is beyond the last expert is not sent: zeros come back in its place.
    `local` holds the local expert of each row that arrives, `counts` how many rows each one gets.
    """

    def __init__(self, experts: torch.Tensor, total: int, group: dist.ProcessGroup) -> None:
        ranks = dist.get_world_size(group)
        device = experts.device
        local_experts = total // ranks
        self.group = group
        self.pairs = experts.numel()
        ordered, order = torch.sort(experts, stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(total + 1, device=device))
        counts = bounds.diff().view(ranks, local_experts)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=group)
        if dist.get_backend(group) == "fake":
            incoming.copy_(counts)  # a rehearsal assumes that others send what this rank sends
        # The one host sync: how many rows are sent and received.
        leaving, arriving = table_of(torch.stack((counts, incoming)), self.pairs)
        self.sent = [sum(row) for row in leaving]
        self.received = [sum(row) for row in arriving]
        self.counts = [sum(column) for column in zip(*arriving, strict=True)]
        self.order = order[: sum(self.sent)]
        numbers = torch.arange(local_experts, device=device).repeat(ranks)
        self.local = numbers.repeat_interleave(incoming.view(-1), output_size=sum(self.received))

    def out(self, rows: torch.Tensor, copies: int = 1) -> torch.Tensor:
        """The rows for this rank's experts; each row has `copies` experts, in turn."""
        taken: torch.Tensor = _Take.apply(rows, self.order, copies)
        arrived: torch.Tensor = _AllToAll.apply(taken, self.sent, self.received, self.group)
        return arrived

    def back(self, results: torch.Tensor) -> torch.Tensor:
        """The results for the rows that were sent, in their original order."""
        returned: torch.Tensor = _AllToAll.apply(results, self.received, self.sent, self.group)
        return returned.new_zeros(self.pairs, returned.shape[1]).index_copy(0, self.order, returned)
