"""Stacks of experts on several ranks: in front of a model's own class, one for each way in which such are called.

The model's own code computes, with the weights of this rank's experts in the place of all: rows travel to it and back
(expert_exchange.py), and it never learns of the others. The host must know how many rows travel, so compiled blocks
are broken here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.nn.adapters.quantized_experts import is_experts
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.expert.exchange import TokenExchange
from shardwise.parallel.tensor.local import to_whole


class ShardedExperts(nn.Module):
    """What a stack of experts on several ranks is besides its own class."""

    total_experts: int
    expert_mesh: DeviceMesh
    gradient_scale: float

    def _exchange(self, experts: torch.Tensor) -> TokenExchange:
        return TokenExchange(experts, self.total_experts, self.expert_mesh.get_group())

    @contextmanager
    def _as_local(self) -> Iterator[dict[str, torch.Tensor]]:
        """The model's own code finds the experts of this rank, and no others, where it looks for all."""
        own = (
            (owner, name, p) for owner in self.modules() for name, p in owner._parameters.items()
        )
        places: list[tuple[nn.Module, str, Any]] = [
            one for one in own if isinstance(one[2], DTensor)
        ]
        weights: dict[str, torch.Tensor] = {}
        for owner, name, parameter in places:
            weights[name] = weight = parameter.to_local()
            if weight.requires_grad and self.gradient_scale != 1:
                weight.register_hook(lambda gradient: gradient * self.gradient_scale)
            owner.__dict__[name] = weight  # before the parameters, where Python looks first
        before = getattr(self, "num_experts", None)
        if before is not None:
            self.num_experts = self.total_experts // self.expert_mesh.size()
        try:
            yield weights
        finally:
            if before is not None:
                self.num_experts = before
            for owner, name, _ in places:
                owner.__dict__.pop(name, None)


class RoutedExperts(ShardedExperts):
    """Called with every token, the numbers of its experts and their weights: nearly all models."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As the model's own, for tokens whose experts may be anywhere in the group."""
        given = (hidden_states, experts, weights)
        replicas = next((x.device_mesh for x in given if isinstance(x, DTensor)), None)
        if replicas is None:
            return self._dispatch(*given)
        # Tensor parallelism: each rank has every token. It sends a share of them, and the results are put together.
        rows, numbers, shares = (to_whole(x.flatten(0, -2), replicas) for x in given)
        parts = (x.redistribute(replicas, [Shard(0)]).to_local() for x in (rows, numbers, shares))
        done = DTensor.from_local(
            self._dispatch(*parts),
            replicas,
            [Shard(0)],
            run_check=False,
            shape=rows.shape,
            stride=rows.stride(),
        ).redistribute(replicas, rows.placements)
        done = done if hidden_states.ndim == 2 else done.unflatten(0, hidden_states.shape[:-1])
        return done if isinstance(hidden_states, DTensor) else done.to_local()

    def _dispatch(
        self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        shape, copies = hidden_states.shape, experts.shape[-1]
        exchange = self._exchange(experts.reshape(-1))
        arrived = exchange.out(hidden_states.reshape(-1, shape[-1]), copies)
        results = exchange.back(self._compute(arrived, exchange.local))
        mixed = results.view(*shape[:-1], copies, shape[-1]) * weights.reshape(
            *shape[:-1], copies, 1
        )
        # Not a view: a model that adds to it in place would undo FSDP's hook on it.
        return mixed.sum(-2).to(hidden_states.dtype)

    def _compute(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        with self._as_local() as weights:
            if len(rows) == 0:
                return _connected(rows, weights)
            computed: torch.Tensor = super().forward(
                rows, experts[:, None], rows.new_ones(len(rows), 1)
            )
            return computed.view(rows.shape)


class SortedExperts(ShardedExperts):
    """Called with rows that are sorted by expert, and how many each one has: jetmoe, aria."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, rows: torch.Tensor, sizes: list[int] | torch.Tensor) -> torch.Tensor:
        """As the model's own, for rows whose experts may be anywhere in the group."""
        _refuse_replicas(self, rows)
        counts = torch.as_tensor(sizes, device=rows.device)
        numbers = torch.arange(self.total_experts, device=rows.device)
        exchange = self._exchange(numbers.repeat_interleave(counts, output_size=len(rows)))
        arrived, order = exchange.out(rows), torch.argsort(exchange.local, stable=True)
        here = (
            exchange.counts if isinstance(sizes, list) else torch.tensor(exchange.counts).to(sizes)
        )
        with self._as_local():
            computed: torch.Tensor = super().forward(arrived[order], here)
        return exchange.back(torch.empty_like(computed).index_copy(0, order, computed))


class EveryExpert(ShardedExperts):
    """Called with a row for every expert and token, zeros where the expert was not chosen: llama4."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """As the model's own, except that rows of zeros stay at home: an expert without bias makes zeros of them."""
        _refuse_replicas(self, rows)
        numbers = torch.arange(self.total_experts, device=rows.device)
        numbers = numbers.repeat_interleave(len(rows) // self.total_experts, output_size=len(rows))
        exchange = self._exchange(
            numbers.masked_fill((rows.detach() == 0).all(-1), self.total_experts)
        )
        arrived, order = exchange.out(rows), torch.argsort(exchange.local, stable=True)
        parts = []
        with self._as_local() as weights:
            alone = {name: weight.split(1) for name, weight in weights.items()}
            for number, part in enumerate(arrived[order].split(exchange.counts)):
                self.__dict__.update({name: each[number] for name, each in alone.items()})
                parts.append(super().forward(part) if len(part) else _connected(part, weights))
        computed = torch.cat(parts)
        return exchange.back(torch.empty_like(computed).index_copy(0, order, computed))


def style_of(module: nn.Module) -> type[ShardedExperts] | None:
    """How a stack of experts is called, if it is one: by what transformers publish of it, else by its signature."""
    if is_experts(module):
        return RoutedExperts
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    own = list(module.parameters(recurse=False))
    stacks = (
        bool(own) and all(p.ndim == 3 for p in own) and "expert" in type(module).__name__.lower()
    )
    if takes == ["hidden_states", "top_k_index", "top_k_weights"] and hasattr(
        module, "num_experts"
    ):
        return RoutedExperts
    if stacks and len(takes) == 2 and "expert" in takes[1]:
        return SortedExperts
    if stacks and len(takes) == 1:
        return EveryExpert
    return None


def experts_in(module: Any) -> int:
    """How many experts a stack has, on all ranks together."""
    return int(getattr(module, "num_experts", None) or next(module.parameters()).shape[0])


def _connected(rows: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """No rows, but in the graph: peers wait for this rank's part in the backward's all-to-alls, FSDP for gradients."""
    return rows + sum(w.narrow(0, 0, 0).sum() for w in weights.values() if w.requires_grad)


def _refuse_replicas(module: nn.Module, rows: torch.Tensor) -> None:
    if isinstance(rows, DTensor):
        raise CannotParallelize(
            "", f"{type(module).__name__} cannot share out the tokens of tensor parallelism"
        )
