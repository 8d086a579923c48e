"""Hooks that sum over the tokens of a forward, at the logits of a model's routers.

[Note: leaving a block] A hook on each router stores its layer's table in a slot, which is collected
at the end of the forward: a compiled block returns it as one more output, without graph breaks or
host syncs. A block that backward recomputes stores it again, with its graph: the slot is cleared
behind the block, or the memory that recomputation saves would be held until the next forward.

[Note: tokens of a rank] In a local block of tensor parallelism (tensor/local_blocks.py) a rank's
router sees its part of the sequence: the tables are summed over the ranks.

[Note: stages] Each stage of a pipeline adds its layers' sums to those of the previous stages, and
sends them on with the hidden states; the last stage computes the losses, and gradients return the
same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.core.compat.torch_private import in_backward
from shardwise.nn.models.build import find_blocks
from shardwise.nn.objective import Loss, Objective, prepared
from shardwise.parallel.context.sums import shares_of, sum_parts
from shardwise.parallel.routers.losses import RouterLossWeights, losses_of, sums_of
from shardwise.parallel.routers.token_groups import Tokens, grouped
from shardwise.parallel.tensor.local import to_local
from shardwise.parallel.tensor.local_blocks import local_run_of

if TYPE_CHECKING:
    from shardwise.config.router import Balance
    from shardwise.parallel.routers.find import RouterModules


class _TableSlot:
    """Holds the table of one router."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None


class RouterLosses:
    """Computes the router losses of a model; call `begin` before a forward, `finish` after it.

    `group`: ranks that have parts of the same sequences, over which the sums are reduced.
    """

    def __init__(
        self,
        sites: Mapping[nn.Module, RouterModules],
        terms: RouterLossWeights,
        balance: Balance = "document",
        tokens: Tokens | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.terms = terms
        self.tokens = tokens or Tokens()
        self._balance = balance
        self._group = group
        self._slots: dict[nn.Module, _TableSlot] = {}
        self._handles: list[Any] = []
        self._before: torch.Tensor | None = None  # sums of the previous stages
        self._micro: int | None = None
        self._tokens_of: dict[int | None, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        if not terms:
            return
        for module, site in sites.items():
            slot = _TableSlot()
            self._slots[module] = slot
            self._handles.append(module.register_forward_hook(self._hook(slot, site)))

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def clear_behind(self, model: nn.Module) -> None:
        """Clears slots behind recomputed blocks; see [Note: leaving a block]."""
        for _, block in find_blocks(model):
            slots = [self._slots[module] for module in block.modules() if module in self._slots]
            if slots:
                block.register_forward_hook(_clearing(slots), always_call=True)

    def begin(self, batch: Any) -> None:
        """Prepares for the forward of a micro-batch."""
        self._before = None
        self._empty()
        self.tokens.set(*grouped(batch, self._balance))
        self._tokens_of[self._micro] = (self.tokens.numbers, self.tokens.weights)

    def finish(self, loss: Loss, name: str) -> Loss:
        """The objective's loss plus the router losses; `name`: what its own part is reported as."""
        if not self.terms:
            return loss
        sums = self.collect()
        weights = self.tokens.weights
        assert sums is not None and weights is not None, "no router was called"
        if self._group is not None:
            table = torch.cat([sums, weights[:-1, None]], 1)
            table = sum_parts(table, self._group)
            sums = table[:, :-1]
            weights = torch.cat([table[:, -1].detach(), weights[-1:]])
        # Each rank with a part of the sequences computes the full losses, and counts 1/n of them.
        shares = shares_of(self._group)
        coefficients = {"aux_loss": self.terms.aux, "z_loss": self.terms.z}
        figures = {**loss.figures, name: loss.total.detach()}
        added: Any = 0
        for key, value in losses_of(sums, weights, self.terms).items():
            share = value / shares
            added = added + coefficients[key] * share
            figures[key] = share.detach()
        return replace(loss, total=loss.total + added, figures=figures)

    def collect(self) -> torch.Tensor | None:
        """The sums so far, including those of previous stages; None if there was no router."""
        tables = [slot.sums for slot in self._slots.values() if slot.sums is not None]
        if self._before is not None:
            tables.append(self._before)
        self._before = None
        self._empty()
        if not tables:
            return None
        if len(tables) == 1:
            return tables[0]
        return torch.stack(tables).sum(0)

    def take(self, sums: torch.Tensor) -> None:
        """Receives the sums of the previous stages."""
        self._before = sums

    def enter(self, micro: int) -> None:
        """Selects a micro-batch of a pipeline, before its forward or backward."""
        self._micro = micro
        if micro in self._tokens_of:
            self.tokens.set(*self._tokens_of[micro])

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Forwards inside of this context add nothing: those of a reference, for one."""
        before = self._tokens_of
        self._tokens_of = {}
        self.tokens.set(None, None)
        self._empty()
        try:
            yield
        finally:
            self._tokens_of = before

    def _empty(self) -> None:
        for slot in self._slots.values():
            slot.sums = None

    def _hook(self, slot: _TableSlot, site: RouterModules) -> Callable[..., None]:
        tokens = self.tokens
        terms = self.terms
        index = site.index
        times = site.times

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if tokens.numbers is None or tokens.weights is None:
                return
            logits = output if index is None else output[index]
            if isinstance(logits, DTensor):
                logits = to_local(logits.redistribute(placements=[Replicate()]), Replicate())
            logits = logits.flatten(0, -2)
            run = local_run_of(module)
            if run is None:
                sums = sums_of(logits, tokens.numbers, tokens.weights, terms)
            else:
                numbers = run.own_tokens(tokens.numbers)
                sums = run.summed(sums_of(run.own_tokens(logits), numbers, tokens.weights, terms))
            slot.sums = sums if times == 1 else sums * times

        return leave


class RoutedObjective:
    """Adds the losses of a model's routers to an objective."""

    def __init__(self, plain: Objective, routers: RouterLosses) -> None:
        self._plain = plain
        self._routers = routers
        self.of_tokens = plain.of_tokens
        self._name = "cross_entropy" if plain.of_tokens else "loss_objective"
        self.figures = tuple(plain.figures)
        if routers.terms:
            self.figures = (*self.figures, self._name, *routers.terms.names)

    def prepare(self, batches: list[Any]) -> list[Any]:
        """As `prepared` of nn/objective.py."""
        with self._routers.silenced():
            return prepared(self._plain, batches)

    def __call__(self, model: Any, batch: Any) -> Loss:
        """The loss, summed over the micro-batch."""
        self._routers.begin(batch)
        return self._routers.finish(self._plain(model, batch), self._name)


def _clearing(slots: list[_TableSlot]) -> Callable[..., None]:
    def clear(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            for slot in slots:
                slot.sums = None

    return clear
