"""Subclasses for sharded stacks of experts, one for each calling convention of transformers.

The model's own forward computes with only the local experts' weights in place; rows travel to it
and back (exchange.py). The host must know how many rows travel, which breaks compiled graphs here.
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
    """Base class of sharded stacks: the exchange of rows, and access to local weights."""

    total_experts: int
    expert_mesh: DeviceMesh
    gradient_scale: float

    def _exchange(self, experts: torch.Tensor) -> TokenExchange:
        return TokenExchange(experts, self.total_experts, self.expert_mesh.get_group())

    @contextmanager
    def _as_local(self) -> Iterator[dict[str, torch.Tensor]]:
        """Replaces the parameters by local weights, by name, for the model's own forward."""
        weights: dict[str, torch.Tensor] = {}
        replaced: list[tuple[nn.Module, str]] = []
        for owner in self.modules():
            for name, parameter in owner._parameters.items():
                if not isinstance(parameter, DTensor):
                    continue
                weight = parameter.to_local()
                if weight.requires_grad and self.gradient_scale != 1:
                    weight.register_hook(lambda gradient: gradient * self.gradient_scale)
                owner.__dict__[name] = weight  # hides the parameter: Python looks here first
                weights[name] = weight
                replaced.append((owner, name))
        num_experts = getattr(self, "num_experts", None)
        if num_experts is not None:
            self.num_experts = self.total_experts // self.expert_mesh.size()
        try:
            yield weights
        finally:
            if num_experts is not None:
                self.num_experts = num_experts
            for owner, name in replaced:
                owner.__dict__.pop(name, None)


class RoutedExperts(ShardedExperts):
    """Called with tokens, the numbers of their experts, and weights: nearly all models."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The model's own forward, for tokens whose experts may be on any rank of the group."""
        inputs = (hidden_states, experts, weights)
        mesh = next((x.device_mesh for x in inputs if isinstance(x, DTensor)), None)
        if mesh is None:
            return self._dispatch(*inputs)
        # With tensor parallelism, each rank has every token: it sends a share of them.
        full = [to_whole(x.flatten(0, -2), mesh) for x in inputs]
        rows = full[0]
        parts = (x.redistribute(mesh, [Shard(0)]).to_local() for x in full)
        output = DTensor.from_local(
            self._dispatch(*parts),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=rows.shape,
            stride=rows.stride(),
        ).redistribute(mesh, rows.placements)
        if hidden_states.ndim > 2:
            output = output.unflatten(0, hidden_states.shape[:-1])
        return output if isinstance(hidden_states, DTensor) else output.to_local()

    def _dispatch(
        self, hidden_states: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        shape = hidden_states.shape
        copies = experts.shape[-1]
        exchange = self._exchange(experts.reshape(-1))
        arrived = exchange.out(hidden_states.reshape(-1, shape[-1]), copies)
        results = exchange.back(self._compute(arrived, exchange.local))
        results = results.view(*shape[:-1], copies, shape[-1])
        weighted = results * weights.reshape(*shape[:-1], copies, 1)
        # Not a view: in-place addition to a view would undo FSDP's hook on it.
        return weighted.sum(-2).to(hidden_states.dtype)

    def _compute(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        with self._as_local() as weights:
            if len(rows) == 0:
                return _connected(rows, weights)
            ones = rows.new_ones(len(rows), 1)
            computed: torch.Tensor = super().forward(rows, experts[:, None], ones)
            return computed.view(rows.shape)


class SortedExperts(ShardedExperts):
    """Called with rows sorted by expert, and the number of rows of each: jetmoe, aria."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, rows: torch.Tensor, sizes: list[int] | torch.Tensor) -> torch.Tensor:
        """The model's own forward, for rows whose experts may be on any rank of the group."""
        _refuse_replicas(self, rows)
        counts = torch.as_tensor(sizes, device=rows.device)
        numbers = torch.arange(self.total_experts, device=rows.device)
        exchange = self._exchange(numbers.repeat_interleave(counts, output_size=len(rows)))
        arrived = exchange.out(rows)
        order = torch.argsort(exchange.local, stable=True)
        local_sizes: list[int] | torch.Tensor = exchange.counts
        if isinstance(sizes, torch.Tensor):
            local_sizes = torch.tensor(exchange.counts).to(sizes)
        with self._as_local():
            computed: torch.Tensor = super().forward(arrived[order], local_sizes)
        return exchange.back(torch.empty_like(computed).index_copy(0, order, computed))


class EveryExpert(ShardedExperts):
    """Called with a row for every expert and token, zeros for experts not chosen: llama4."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The model's own forward; rows of zeros, which stay zero without a bias, are not sent."""
        _refuse_replicas(self, rows)
        numbers = torch.arange(self.total_experts, device=rows.device)
        numbers = numbers.repeat_interleave(len(rows) // self.total_experts, output_size=len(rows))
        unused = (rows.detach() == 0).all(-1)
        exchange = self._exchange(numbers.masked_fill(unused, self.total_experts))
        arrived = exchange.out(rows)
        order = torch.argsort(exchange.local, stable=True)
        outputs = []
        with self._as_local() as weights:
            by_expert = {name: weight.split(1) for name, weight in weights.items()}
            for number, part in enumerate(arrived[order].split(exchange.counts)):
                for name, slices in by_expert.items():
                    self.__dict__[name] = slices[number]
                output = super().forward(part) if len(part) else _connected(part, weights)
                outputs.append(output)
        computed = torch.cat(outputs)
        return exchange.back(torch.empty_like(computed).index_copy(0, order, computed))


def style_of(module: nn.Module) -> type[ShardedExperts] | None:
    """The subclass for a stack of experts, by its interface or signature; else None."""
    if is_experts(module):
        return RoutedExperts
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    routed = arguments == ["hidden_states", "top_k_index", "top_k_weights"]
    if routed and hasattr(module, "num_experts"):
        return RoutedExperts
    own = list(module.parameters(recurse=False))
    if not own or any(p.ndim != 3 for p in own) or "expert" not in type(module).__name__.lower():
        return None
    if len(arguments) == 2 and "expert" in arguments[1]:
        return SortedExperts
    if len(arguments) == 1:
        return EveryExpert
    return None


def experts_in(module: Any) -> int:
    """The number of experts of a stack, on all ranks together."""
    return int(getattr(module, "num_experts", None) or next(module.parameters()).shape[0])


def _connected(rows: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """No rows, but part of the graph: peers wait in backward's all-to-alls, FSDP for gradients."""
    return rows + sum(w.narrow(0, 0, 0).sum() for w in weights.values() if w.requires_grad)


def _refuse_replicas(module: nn.Module, rows: torch.Tensor) -> None:
    if isinstance(rows, DTensor):
        raise CannotParallelize(
            "", f"{type(module).__name__} cannot share out the tokens of tensor parallelism"
        )
