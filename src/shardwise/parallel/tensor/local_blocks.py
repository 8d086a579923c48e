"""Blocks whose code runs on this rank's shards as plain tensors, without DTensor.

[Note: local blocks] Inside a local block attention modules see their share of the heads, and hidden
states are sharded along the sequence. Collectives are where Megatron has them: the sequence is
gathered before column layers, and the sums of row layers are scattered along it. Each rank computes
a part of every sum, so gradients of all replicated parameters are partial; those of a block are
summed over the ranks by one all-reduce. A dense block is compiled as one graph.

Tokens may also come as rows of a matrix. Routers see this rank's tokens; stacks of experts gather
tokens and their choices, compute the experts of this rank and scatter the sums. A norm over the
outputs of a column layer gathers their features. The rows of a fused projection are shards of the
stored weight; its parts (queries, keys and values; gate and up) are gathered and cut one by one.

Whether blocks of a kind may run so is tried on a tiny model of the class (local_trial.py). Others,
and rows whose length the ranks do not divide, run on DTensors (layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.core.compat.torch_private import (
    all_gather_flat,
    all_reduce_flat,
    local_tensor,
    reduce_scatter_flat,
    spec_of,
    tree_leaves,
    tree_map,
)
from shardwise.parallel.tensor.local import to_local, wrap
from shardwise.parallel.tensor.own_experts import sum_of_own_experts

Sequence = Callable[[torch.Tensor], torch.Tensor]
Attributes = Mapping[nn.Module, Mapping[str, Any]]


@dataclass(frozen=True)
class TensorRanks:
    """The ranks of a tensor-parallel group: differentiable `gather` and `scatter` of (rows, width,
    features) along the width, and a plain sum."""

    size: int
    rank: int
    gather: Sequence
    scatter: Sequence
    add_up: Sequence


def ranks_of(mesh: DeviceMesh) -> TensorRanks:
    """The ranks of a mesh, by collectives that the compiler knows."""
    size = mesh.size()
    name = mesh.get_group().group_name
    gather, scatter = along_sequence(
        size, lambda x: all_gather_flat(x, size, name), lambda x: reduce_scatter_flat(x, size, name)
    )
    return TensorRanks(
        size, mesh.get_local_rank(), gather, scatter, lambda x: all_reduce_flat(x, name)
    )


def along_sequence(size: int, gather: Sequence, scatter: Sequence) -> tuple[Sequence, Sequence]:
    """Differentiable gather and reduce-scatter along dim 1, of collectives along dim 0."""

    def gather_width(x: torch.Tensor) -> torch.Tensor:
        rows, width, *rest = x.shape
        parts = gather(x.contiguous()).view(size, rows, width, *rest)
        return parts.transpose(0, 1).reshape(rows, size * width, *rest)

    def scatter_width(x: torch.Tensor) -> torch.Tensor:
        rows, width, *rest = x.shape
        parts = x.view(rows, size, width // size, *rest).transpose(0, 1)
        return scatter(parts.reshape(size * rows, width // size, *rest))

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gather_width(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return scatter_width(gradient.contiguous())

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return scatter_width(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gather_width(gradient)

    return Gather.apply, Scatter.apply


class LocalRun:
    """Whether a local block is running: the shape of this rank's part of the rows, or 0."""

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks
        self.rows = 0
        self.width = 0

    def gathered(self, x: Any) -> Any:
        """Hidden states of all ranks, if `x` is this rank's part, as rows of tokens or tokens."""
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        if x.ndim == 2 and self.is_part(x):
            return self.all_tokens(x)
        return self.ranks.gather(x) if x.ndim == 3 and x.shape[1] == self.width else x

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over the ranks of hidden states."""
        if x.ndim == 3:
            return self.ranks.scatter(x)
        return self.ranks.scatter(x.view(self.rows, -1, x.shape[-1])).flatten(0, 1)

    def column(self, forward: Callable[..., Any], x: torch.Tensor) -> Any:
        """Forward of a layer whose outputs are sharded."""
        return forward(self.gathered(x))

    def row(self, forward: Callable[..., Any], x: torch.Tensor) -> Any:
        """Forward of a layer whose inputs are sharded: this rank's part of the sum."""
        return self.scattered(forward(x))

    def experts(
        self,
        module: Any,
        forward: Callable[..., Any],
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        *rest: Any,
    ) -> torch.Tensor:
        """Forward of a stack of experts that is sharded over the ranks, for this rank's tokens."""
        inputs = (self.all_tokens(x.flatten(0, -2)) for x in (hidden, index, weights))
        count = int(getattr(module, next(iter(module._parameters))).shape[0])
        first = self.ranks.rank * count
        summed = sum_of_own_experts(module, forward, first, count, *inputs, *rest)
        return self.scattered(summed).view(hidden.shape)

    def norm(
        self, features: int, forward: Callable[..., Any], x: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        """Forward of a norm over `features`, of which `x` may be this rank's part."""
        own = x.shape[-1]
        if not self.width or own * self.ranks.size != features:
            return forward(x, *rest)  # type: ignore[no-any-return]
        gathered = self.ranks.gather(x.reshape(-1, own)).view(*x.shape[:-1], features)
        y: torch.Tensor = forward(gathered, *rest)
        return y.narrow(-1, self.ranks.rank * own, own)

    def is_part(self, tokens: torch.Tensor) -> bool:
        """Whether the first dim counts this rank's tokens."""
        return len(tokens) == self.rows * self.width

    def all_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """The tokens of all ranks, in the order of the rows, from this rank's."""
        return self.ranks.gather(own.reshape(self.rows, self.width, -1)).flatten(0, 1)

    def own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of all; of its own, all."""
        if self.is_part(tokens):
            return tokens
        split = tokens.view(self.rows, self.ranks.size, self.width, *tokens.shape[1:])
        return split[:, self.ranks.rank].flatten(0, 1)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, of which every rank computes the same loss."""
        total: torch.Tensor = _Summed.apply(x, self.ranks.add_up)  # type: ignore[no-untyped-call]
        return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, add_up: Sequence) -> torch.Tensor:  # type: ignore[override]
        return add_up(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


def local_run_of(module: nn.Module) -> LocalRun | None:
    """The run of the local block that a module is in, while the block is running."""
    run: LocalRun | None = vars(module).get("local_run")
    return run if run is not None and run.width else None


class LocalConfig:
    """A model's config with a rank's share of some counts."""

    def __init__(self, config: Any, counts: Mapping[str, int]) -> None:
        vars(self).update(counts)
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def gather_inputs(run: LocalRun, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Pre-hook: gathers once for all layers of the module."""
    args = tuple(map(run.gathered, args))
    return args, {name: run.gathered(x) for name, x in kwargs.items()}


def part_sizes(count: int, outputs: int, read: int) -> tuple[int, ...]:
    """The parts of a fused projection: the first is as wide as what the next layer reads."""
    return (read, *[(outputs - read) // (count - 1)] * (count - 1))


def own_rows(sizes: tuple[int, ...], ranks: int, rank: int) -> torch.Tensor:
    """The rows of a rank of a projection that is cut part by part."""
    rows = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.chunk(ranks)[rank] for part in rows])


@dataclass(frozen=True)
class Slot:
    """Where a block has a parameter, and what its code sees of it.

    `once`: only the first rank adds it to a sum over ranks. `heads`: a replicated vector of which
    it sees this rank's part. `sizes`: the parts of a fused projection, along `dim`.
    """

    module: nn.Module
    name: str
    once: bool = False
    heads: bool = False
    sizes: tuple[int, ...] = ()
    dim: int = 0

    def seen(self, shard: torch.Tensor, ranks: TensorRanks) -> torch.Tensor:
        """What the block's code sees of a parameter, from its local shard."""
        if self.heads:
            return shard.chunk(ranks.size)[ranks.rank]
        if not self.sizes:
            return shard
        rows = shard.movedim(self.dim, 0)
        full = ranks.gather(rows.reshape(1, len(rows), prod(rows.shape[1:])))[0]
        index = own_rows(self.sizes, ranks.size, ranks.rank).to(full.device)
        return full[index].view(rows.shape).movedim(0, self.dim)


class LocalBlock:
    """The forward of a block: on plain tensors where it can, else by `fallback`.

    `compute` is the block's own forward; `attributes` are counts that modules see their share of.
    """

    def __init__(
        self,
        run: LocalRun,
        mesh: DeviceMesh,
        compute: Callable[..., Any],
        fallback: Callable[..., Any],
        slots: tuple[Slot, ...],
        attributes: Attributes,
    ) -> None:
        self.compute = compute
        self._run = run
        self._mesh = mesh
        self._fallback = fallback
        self._slots = slots
        self._attributes = attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden_states((args, kwargs))
        if hidden is None or hidden.shape[1] % self._run.ranks.size or hidden.shape[1] == 1:
            return self._fallback(*args, **kwargs)
        width = hidden.shape[1] // self._run.ranks.size

        def enter(x: Any) -> Any:
            return to_local(x, x.placements[0]) if isinstance(x, DTensor) else x

        def leave(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.ndim != 3 or x.shape[1] != width:
                return x
            shape = torch.Size((x.shape[0], hidden.shape[1], x.shape[2]))
            return wrap(x, self._mesh, Shard(1), shape)

        with self._localised(hidden.shape[0], width):
            output = self.compute(*tree_map(enter, args), **tree_map(enter, kwargs))
        return tree_map(leave, output)

    @contextmanager
    def _localised(self, rows: int, width: int) -> Iterator[None]:
        """Within it modules see this rank's shards and counts."""
        parameters = [slot.module._parameters[slot.name] for slot in self._slots]
        for slot, value in zip(self._slots, self._local(parameters), strict=True):
            slot.module.__dict__[slot.name] = value
        before = [
            (module, {n: vars(module)[n] for n in v}) for module, v in self._attributes.items()
        ]
        for module, values in self._attributes.items():
            vars(module).update(values)
        self._run.rows = rows
        self._run.width = width
        try:
            yield
        finally:
            self._run.width = 0
            for module, values in before:
                vars(module).update(values)
            for slot in self._slots:
                slot.module.__dict__.pop(slot.name, None)

    def _local(self, parameters: list[Any]) -> list[torch.Tensor]:
        trained = [p for p in parameters if p.requires_grad]
        once = [s.once for s, p in zip(self._slots, parameters, strict=True) if p.requires_grad]
        ways = _LocalParameters.apply(self._run.ranks, once, *trained) if trained else ()  # type: ignore[no-untyped-call]
        shards = iter(ways)
        values = []
        for slot, parameter in zip(self._slots, parameters, strict=True):
            if parameter.requires_grad:
                local = next(shards)
            else:
                local = local_tensor(parameter)
                if slot.once and self._run.ranks.rank:
                    local = torch.zeros_like(local)
            values.append(slot.seen(local, self._run.ranks))
        return values


class _LocalParameters(torch.autograd.Function):
    """DTensors to this rank's shards; gradients of replicated ones are added up at once."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, ranks: TensorRanks, once: list[bool], *parameters: DTensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.ranks = ranks
        ctx.specs = [spec_of(p) for p in parameters]
        ctx.set_materialize_grads(False)
        shards = [local_tensor(p) for p in parameters]
        ctx.zero = [flag and ranks.rank > 0 for flag in once]
        return tuple(
            torch.zeros_like(x) if zero else x.view_as(x)
            for x, zero in zip(shards, ctx.zero, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        locals_ = [
            torch.zeros_like(g) if g is not None and zero else g
            for g, zero in zip(gradients, ctx.zero, strict=True)
        ]
        partial = [
            i for i, (g, spec) in enumerate(zip(locals_, ctx.specs, strict=True))
            if g is not None and isinstance(spec.placements[0], Replicate)
        ]  # fmt: skip
        for dtype in {locals_[i].dtype for i in partial}:  # type: ignore[union-attr]
            group = [i for i in partial if locals_[i].dtype == dtype]  # type: ignore[union-attr]
            flat = torch.cat([locals_[i].reshape(-1) for i in group])  # type: ignore[union-attr]
            summed = ctx.ranks.add_up(flat)
            sizes = [locals_[i].numel() for i in group]  # type: ignore[union-attr]
            for i, part in zip(group, summed.split(sizes), strict=True):
                locals_[i] = part.view(locals_[i].shape)  # type: ignore[union-attr]
        return (None, None, *map(_as_dtensor, locals_, ctx.specs))


def _as_dtensor(local: torch.Tensor | None, spec: Any) -> DTensor | None:
    if local is None:
        return None
    return DTensor(local.contiguous(), spec, requires_grad=False)


def _hidden_states(tree: Any) -> DTensor | None:
    """The hidden states among a block's arguments, if nothing speaks against running locally."""
    hidden = None
    for x in tree_leaves(tree):
        if not isinstance(x, DTensor):
            continue
        if x.placements == (Shard(1),) and x.ndim == 3:
            hidden = hidden if hidden is not None else x
        elif x.requires_grad or not isinstance(x.placements[0], Replicate):
            return None
    return hidden
