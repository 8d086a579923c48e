"""Times the collectives of a sharded model by wrapping FSDP's gathers and reductions.

All-gather and reduce-scatter are objects that FSDP calls. The all-reduce across replicas is not,
but FSDP calls a hook right after it on the same stream; it is timed from the end of the previous
operation (the reduce-scatter, or without one the copy into the buffer) to that hook.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.core.compat.torch_private import (
    AllGather,
    ReduceScatter,
    all_gather_of,
    all_reduce_group,
    all_reduce_hook,
    is_hybrid,
    parameter_groups,
    reduce_scatter_of,
)
from shardwise.observe.breakdown import Timer
from shardwise.parallel.zero.collectives import WeightGather


def watch_collectives(model: nn.Module, timer: Timer) -> None:
    """Reports every gather and reduction of the model's parameters to a timer, after sharding."""
    if not timer.on:
        return
    for unit in model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in parameter_groups(unit):
            if isinstance(all_gather_of(group), _TimedGather):
                continue  # modules that share a group
            unit.set_custom_all_gather(_TimedGather(all_gather_of(group), timer))
            reduce = _TimedReduce(reduce_scatter_of(group), timer)
            unit.set_custom_reduce_scatter(reduce)
            if is_hybrid(group):
                hook = reduce.finish_hook(all_reduce_group(group), all_reduce_hook(group))
                unit.set_all_reduce_hook(hook)


class _TimedGather(AllGather):
    def __init__(self, inner: Any, timer: Timer) -> None:
        self._inner = inner
        self._timer = timer

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer: torch.Tensor = self._inner.allocate(*args, **kwargs)
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        size = output_tensor.nbytes
        if isinstance(self._inner, WeightGather):
            size = self._inner.moved(input_tensor, group.size())
        with self._timer.collective("all_gather", size, group.size(), part="gather"):
            return self._inner(output_tensor, input_tensor, group, async_op)


class _TimedReduce(ReduceScatter):
    def __init__(self, inner: Any, timer: Timer) -> None:
        self._inner = inner
        self._timer = timer
        self._open: AbstractContextManager[Any] | None = None
        self._replicas = 1

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer: torch.Tensor = self._inner.allocate(*args, **kwargs)
        self._begin(buffer)
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        size = input_tensor.nbytes
        with self._timer.collective("reduce_scatter", size, group.size(), part="reduce"):
            work = self._inner(output_tensor, input_tensor, group, op, async_op)
        self._begin(output_tensor)
        return work

    def finish_hook(
        self, group: dist.ProcessGroup, then: Callable[[torch.Tensor], None] | None
    ) -> Any:
        """A hook for the end of the all-reduce over `group`, which then calls the previous hook."""
        self._replicas = group.size()

        def hook(reduced: torch.Tensor) -> None:
            if self._open is not None:
                self._open.__exit__(None, None, None)
                self._open = None
            if then is not None:
                then(reduced)

        return hook

    def _begin(self, buffer: torch.Tensor) -> None:
        """Starts to time an all-reduce; dropped if none follows (not the last micro-batch)."""
        self._open = self._timer.collective(
            "all_reduce", buffer.nbytes, self._replicas, part="reduce"
        )
        self._open.__enter__()
