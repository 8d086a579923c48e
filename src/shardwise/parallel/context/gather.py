"""Modules that mix positions by code of their own (state spaces, linear attention, attention with biases of its own).

What they do cannot be divided from outside. So each rank hands them whole rows, put together from all ranks' parts, and
goes on with its own part of what they make. They cost every rank what they cost one; all else of the model is divided.
Which dimension of which argument goes along the sequence was seen by gate.py.
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
    """How modules of a class are called: the dimension along the sequence of each argument, and of each result.

    By their place in the call. A number of columns has None; so has a result that no part can be taken of.
    """

    arguments: Mapping[str, int | None]
    results: Mapping[str, int | None]


def modules_of(model: nn.Module, kinds: Collection[str]) -> Iterator[tuple[str, str, nn.Module]]:
    """Modules of some classes, each as (class, name, module), but for those inside of another.

    FSDP and others may have put a subclass of their own in front.
    """
    outer = "\0"
    for name, module in model.named_modules():
        kind = next((c.__name__ for c in type(module).__mro__ if c.__name__ in kinds), None)
        if kind is not None and not name.startswith(outer + "."):
            outer = name
            yield kind, name, module


def call_changed(
    forward: Callable[..., Any], args: Any, kwargs: Any,
    argument: Callable[[str, Any], Any], result: Callable[[str, Any], Any],
) -> Any:  # fmt: skip
    """Calls with every leaf of the arguments changed, and changes every leaf of what comes back."""
    leaves, tree = tree_flatten_with_path((args, kwargs))
    args, kwargs = tree_unflatten([argument(keystr(path), leaf) for path, leaf in leaves], tree)
    leaves, tree = tree_flatten_with_path(forward(*args, **kwargs))
    return tree_unflatten([result(keystr(path), leaf) for path, leaf in leaves], tree)


class Gathering:
    """Puts whole rows together for the modules that need them, over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, zigzag: bool, divided: Callable[[], bool]) -> None:
        self._group, self._zigzag, self._divided = group, zigzag, divided
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def wrap(self, module: nn.Module, calls: CallShapes) -> None:
        """From now on the module's forward computes with whole rows."""
        forward = module.forward

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def whole(*args: Any, **kwargs: Any) -> Any:
            if not self._divided():
                return forward(*args, **kwargs)

            def argument(place: str, leaf: Any) -> Any:
                if isinstance(leaf, (ContextRows, ContextMask)):
                    return leaf.whole
                return (
                    self._gather(leaf, calls.arguments[place]) if place in calls.arguments else leaf
                )

            def result(place: str, leaf: Any) -> Any:
                if place not in calls.results:
                    return leaf
                dim = calls.results[place]
                return (
                    None
                    if dim is None or leaf is None
                    else take_columns(leaf, self._ranks, self._rank, self._zigzag, dim)
                )

            return call_changed(forward, args, kwargs, argument, result)

        module.forward = whole

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
    """All ranks' parts along a dimension, in the order of rows; back goes the sum of all ranks' gradients of a part."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup, zigzag: bool
    ) -> torch.Tensor:
        ctx.given = (dim, group, zigzag)
        ranks = dist.get_world_size(group)
        sent = part.to(torch.uint8) if part.dtype == torch.bool else part
        found = torch.empty((ranks, *sent.shape), dtype=sent.dtype, device=sent.device)
        all_gather(found, sent.contiguous()[None], group=group)
        chunks: dict[int, torch.Tensor] = {}
        for rank, one in enumerate(found.to(part.dtype)):
            chunks |= zip(chunks_of(ranks, rank, zigzag), one.chunk(2, dim), strict=True)
        return torch.cat([chunks[i] for i in range(2 * ranks)], dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dim, group, zigzag = ctx.given
        ranks = dist.get_world_size(group)
        parts = torch.stack([take_columns(grad, ranks, rank, zigzag, dim) for rank in range(ranks)])
        mine = torch.empty_like(parts[:1])
        dist.reduce_scatter_tensor(mine, parts, group=group)
        return mine[0], None, None, None
