"""Modules that mix positions by their own code: state spaces, linear attention, biased attention.

Such a module cannot be sharded from outside. Each rank gathers full rows for it from all ranks'
parts and takes its own part of the result, so these modules cost every rank as much as a single
process; the rest of the model is sharded. support.py found which dimension of which argument runs
along the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.core.compat.torch_private import keystr, tree_flatten_with_path, tree_unflatten
from shardwise.nn.tiny.case import CannotParallelize
from shardwise.parallel.context.mask import ContextMask, ContextRows
from shardwise.parallel.context.split import chunks_of, take_columns
from shardwise.parallel.zero.collectives import all_gather


@dataclass(frozen=True)
class CallShapes:
    """The sequence dimension of each argument and result of a class, by its place in the call.

    None for an argument that is the number of columns, and for a result that cannot be split.
    """

    arguments: Mapping[str, int | None]
    results: Mapping[str, int | None]


def modules_of(model: nn.Module, kinds: Collection[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Outermost modules of the given classes, each as (class, name, module).

    Base classes count too: FSDP and others may have replaced the class by a subclass.
    """
    outer = "\0"
    for name, module in model.named_modules():
        kind = next((c.__name__ for c in type(module).__mro__ if c.__name__ in kinds), None)
        if kind is not None and not name.startswith(outer + "."):
            outer = name
            yield kind, name, module


def call_changed(
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    argument: Callable[[str, Any], Any],
    result: Callable[[str, Any], Any],
) -> Any:
    """Calls with `argument` applied to every leaf of the arguments, and `result` to the results."""
    leaves, tree = tree_flatten_with_path((args, kwargs))
    args, kwargs = tree_unflatten([argument(keystr(path), leaf) for path, leaf in leaves], tree)
    leaves, tree = tree_flatten_with_path(forward(*args, **kwargs))
    return tree_unflatten([result(keystr(path), leaf) for path, leaf in leaves], tree)


class Gathering:
    """Gathers full rows over a group for the modules that need them."""

    def __init__(self, group: dist.ProcessGroup, zigzag: bool, sharded: Callable[[], bool]) -> None:
        self._group = group
        self._zigzag = zigzag
        self._sharded = sharded
        self._ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def wrap(self, module: nn.Module, calls: CallShapes) -> None:
        """Makes the module's forward compute with full rows."""
        forward = module.forward

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def gathered(*args: Any, **kwargs: Any) -> Any:
            if not self._sharded():
                return forward(*args, **kwargs)

            def argument(place: str, leaf: Any) -> Any:
                if isinstance(leaf, (ContextRows, ContextMask)):
                    return leaf.full
                if place not in calls.arguments:
                    return leaf
                return self._gather(leaf, calls.arguments[place])

            def result(place: str, leaf: Any) -> Any:
                if place not in calls.results:
                    return leaf
                dim = calls.results[place]
                if dim is None or leaf is None:
                    return None
                return take_columns(leaf, self._ranks, self._rank, self._zigzag, dim)

            return call_changed(forward, args, kwargs, argument, result)

        module.forward = gathered

    def _gather(self, leaf: Any, dim: int | None) -> Any:
        if leaf is None:  # not every call has every argument
            return None
        if dim is None:
            return leaf * self._ranks
        if isinstance(leaf, DTensor):
            raise CannotParallelize(
                "", "modules that need whole rows do not go with tensor parallelism"
            )
        return _Gather.apply(leaf, dim, self._group, self._zigzag)


class _Gather(torch.autograd.Function):
    """All ranks' parts along a dimension, in row order; backward sums all ranks' gradients."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup, zigzag: bool
    ) -> torch.Tensor:
        ctx.settings = (dim, group, zigzag)
        ranks = dist.get_world_size(group)
        sent = part.to(torch.uint8) if part.dtype == torch.bool else part
        received = torch.empty((ranks, *sent.shape), dtype=sent.dtype, device=sent.device)
        all_gather(received, sent.contiguous()[None], group=group)
        chunks: dict[int, torch.Tensor] = {}
        for rank, rank_part in enumerate(received.to(part.dtype)):
            chunks |= zip(chunks_of(ranks, rank, zigzag), rank_part.chunk(2, dim), strict=True)
        return torch.cat([chunks[i] for i in range(2 * ranks)], dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dim, group, zigzag = ctx.settings
        ranks = dist.get_world_size(group)
        parts = torch.stack([take_columns(grad, ranks, rank, zigzag, dim) for rank in range(ranks)])
        local = torch.empty_like(parts[:1])
        dist.reduce_scatter_tensor(local, parts, group=group)
        return local[0], None, None, None
