"""Rows travel to the ranks that hold their experts, and back: two all-to-alls each way, one look of the host at counts.

Whoever has rows with an expert's number each makes an `TokenExchange`, sends them `out`, computes what came in with the
experts that live here, and brings the results `back` into the places that the rows came from.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.effective_device import table_of


class _AllToAll(torch.autograd.Function):
    """Rows of uneven numbers between all ranks; gradients go the same ways in the other direction."""

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
    """Row `order[i] // copies` for each i; backward gathers and adds a row's copies in a fixed order (no atomics)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, copies: int) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(order)
        ctx.shape, ctx.copies = rows.shape, copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        count, width = ctx.shape
        spread = gradient.new_zeros(count * ctx.copies, width)
        spread[order] = gradient
        return spread.view(count, ctx.copies, width).sum(1), None, None


class TokenExchange:
    """Where each row of a batch goes, by the number of its expert; the experts lie in equal shares on the ranks.

    A number beyond the last expert means that no expert is asked: its row stays, and zeros come back in its place.
    Afterwards `local` has the numbers, among the experts that live here, of the rows that come in, and `counts` how
    many each of them gets.
    """

    def __init__(self, experts: torch.Tensor, total: int, group: dist.ProcessGroup) -> None:
        ranks, device = dist.get_world_size(group), experts.device
        self.group, self.pairs, self.here = group, experts.numel(), total // ranks
        ordered, order = torch.sort(experts, stable=True)
        counts = (
            torch.searchsorted(ordered, torch.arange(total + 1, device=device))
            .diff()
            .view(ranks, self.here)
        )
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        if dist.get_backend(group) == "fake":
            coming.copy_(counts)  # nobody tells in a rehearsal: others send what we send
        # The one look of the host: how much is sent and received.
        leaving, arriving = table_of(torch.stack((counts, coming)), self.pairs)
        self.sent = [sum(row) for row in leaving]
        self.received = [sum(row) for row in arriving]
        self.counts = [sum(column) for column in zip(*arriving, strict=True)]
        self.order = order[: sum(self.sent)]
        numbers = torch.arange(self.here, device=device).repeat(ranks)
        self.local = numbers.repeat_interleave(coming.view(-1), output_size=sum(self.received))

    def out(self, rows: torch.Tensor, copies: int = 1) -> torch.Tensor:
        """The rows that this rank's experts are asked for; with `copies`, each is asked for that many times in turn."""
        taken: torch.Tensor = _Take.apply(rows, self.order, copies)
        arrived: torch.Tensor = _AllToAll.apply(taken, self.sent, self.received, self.group)
        return arrived

    def back(self, results: torch.Tensor) -> torch.Tensor:
        """One row for each that was asked for, in the order of asking."""
        returned: torch.Tensor = _AllToAll.apply(results, self.received, self.sent, self.group)
        return returned.new_zeros(self.pairs, returned.shape[1]).index_copy(0, self.order, returned)
