"""Sums over the tokens of a forward, taken where a model's routers make their logits.

[Note: leaving a block] A hook on each router leaves its layer's table in a slot, whence it is collected at the end of
the forward: a compiled block returns it as one more output, and nothing is broken or waited for. A block that backward
recomputes leaves it again, with all that it was made from: the slot is emptied behind it, or the memory that
recomputation saves would be held until the next forward.

[Note: stages] Each stage of a pipeline adds its layers' sums to those of the stages before, and hands them on with the
hidden states; the last one computes the losses, and gradients come back the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.core.compat.torch_private import in_backward
from shardwise.nn.models.build import find_blocks
from shardwise.nn.objective import Loss, Objective
from shardwise.parallel.routers.losses import Terms, losses_of, sums_of
from shardwise.parallel.routers.token_groups import Tokens, grouped
from shardwise.parallel.tensor.local import to_local

if TYPE_CHECKING:
    from shardwise.config.router import Balance
    from shardwise.parallel.routers.find import Site


class _TableSlot:
    """Where a router leaves its table."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None


class RouterLosses:
    """Watches the routers of a model; `begin` before a forward, `finish` after it.

    `group`: ranks that have parts of the same sequences, over which sums are added up.
    """

    def __init__(
        self,
        sites: Mapping[nn.Module, Site],
        terms: Terms,
        balance: Balance = "document",
        tokens: Tokens | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.terms, self.tokens, self._balance, self._group = (
            terms,
            tokens or Tokens(),
            balance,
            group,
        )
        self._slots: dict[nn.Module, _TableSlot] = {}
        self._handles: list[Any] = []
        self._before: torch.Tensor | None = None  # sums of the stages before
        self._micro: int | None = None
        self._known: dict[int | None, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        for module, site in sites.items() if terms else ():
            self._slots[module] = slot = _TableSlot()
            self._handles.append(module.register_forward_hook(self._hook(slot, site)))

    def remove(self) -> None:
        """Watches no longer."""
        for handle in self._handles:
            handle.remove()

    def clear_behind(self, model: nn.Module) -> None:
        """Empties slots behind blocks that backward recomputes; see [Note: leaving a block]."""
        for _, block in find_blocks(model):
            if slots := [
                slot for module, slot in self._slots.items() if module in set(block.modules())
            ]:
                block.register_forward_hook(_clearing(slots), always_call=True)

    def begin(self, batch: Any) -> None:
        """Before the forward of a micro-batch."""
        self._before = None
        self._empty()
        self.tokens.set(*grouped(batch, self._balance))
        self._known[self._micro] = self.tokens.numbers, self.tokens.weights

    def finish(self, loss: Loss, name: str) -> Loss:
        """The objective's loss with those of the routers; `name` is what its own is reported as."""
        if not self.terms:
            return loss
        sums, weights = self.collect(), self.tokens.weights
        assert sums is not None and weights is not None, "no router was called"
        if self._group is not None:
            table = torch.cat([sums, weights[:-1, None]], 1)
            table = _Summed.apply(table, self._group)
            sums, weights = table[:, :-1], torch.cat([table[:, -1].detach(), weights[-1:]])
        # Each rank that has a part of the sequences has all of the loss: a share of it is its own.
        shares = 1 if self._group is None else dist.get_world_size(self._group)
        found = {key: value / shares for key, value in losses_of(sums, weights, self.terms).items()}
        terms = self.terms
        total = loss.total + sum(
            c * found[n] for n, c in (("aux_loss", terms.aux), ("z_loss", terms.z)) if c
        )
        own = {name: loss.total.detach()} | {key: value.detach() for key, value in found.items()}
        return replace(loss, total=total, figures={**loss.figures, **own})

    def collect(self) -> torch.Tensor | None:
        """The sums so far, those of the stages before included; None where there was no router."""
        found = [slot.sums for slot in self._slots.values() if slot.sums is not None]
        found += [] if self._before is None else [self._before]
        self._before = None
        self._empty()
        return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None

    def take(self, sums: torch.Tensor) -> None:
        """What the stages before have summed up."""
        self._before = sums

    def enter(self, micro: int) -> None:
        """Before anything is computed for a micro-batch of a pipeline, forward or backward."""
        self._micro = micro
        if micro in self._known:
            self.tokens.set(*self._known[micro])

    def _empty(self) -> None:
        for slot in self._slots.values():
            slot.sums = None

    def _hook(self, slot: _TableSlot, site: Site) -> Callable[..., None]:
        tokens, terms, index, times = self.tokens, self.terms, site.index, site.times

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if tokens.numbers is None or tokens.weights is None:
                return
            logits = output if index is None else output[index]
            if isinstance(logits, DTensor):
                logits = to_local(logits.redistribute(placements=[Replicate()]), Replicate())
            sums = sums_of(logits.flatten(0, -2), tokens.numbers, tokens.weights, terms)
            slot.sums = sums if times == 1 else sums * times

        return leave


class RoutedObjective:
    """An objective whose model has routers: their losses are added to its own."""

    def __init__(self, plain: Objective, routers: RouterLosses) -> None:
        self._plain, self._routers, self.of_tokens = plain, routers, plain.of_tokens
        self._name = "cross_entropy" if plain.of_tokens else "loss_objective"
        self.figures = (
            *plain.figures,
            *([self._name, *routers.terms.names] if routers.terms else []),
        )

    def __call__(self, model: Any, batch: Any) -> Loss:
        """Summed over the micro-batch."""
        self._routers.begin(batch)
        return self._routers.finish(self._plain(model, batch), self._name)


class _Summed(torch.autograd.Function):
    """The sum over ranks. Each goes on to the same loss and takes 1/n of it: back comes n times its gradient."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.ranks = dist.get_world_size(group)
        summed = table.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.ranks, None


def _clearing(slots: list[_TableSlot]) -> Callable[..., None]:
    def clear(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            for slot in slots:
                slot.sums = None

    return clear
