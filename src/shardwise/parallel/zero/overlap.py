"""Overlaps communication with compute: gathers some units ahead and, on CPUs, deferred reductions.

[Note: overlap] On a GPU FSDP queues collectives on streams of their own. By default it gathers one
unit ahead in backward, and in forward as many as the host is ahead of the device; lists of units
set the number in both. On a CPU there are no streams: FSDP waits for each collective where it calls
it. There
  gathers     are asynchronous operations (FSDP starts one where `_set_unshard_async_op` is on, and
              waits for its work where the unit is used). One unit ahead is then the least that
              hides anything.
  reductions  are started and left to gloo's threads; the end of backward waits for the last. FSDP
              continues as if the result were complete, so this is only where it makes nothing of it
              before then but a view that becomes the gradient: a first gradient (not one to add
              to), of the parameter's own type, no all-reduce across replicas after it, no hook that
              takes it. Otherwise FSDP waits for the reduction as before.
Neither the values nor the order of any sum change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.config.schema import Parallel
from shardwise.core.compat.torch_private import (
    ReduceScatter,
    all_reduce_hook,
    at_end_of_backward,
    fsdp_state,
    gradient_dtype,
    has_accumulate_hooks,
    is_hybrid,
    parameter_groups,
    set_async_gather,
)
from shardwise.core.effective_device import effective_device
from shardwise.parallel.zero.collectives import PlainBuffers, reduce_scatter
from shardwise.parallel.zero.stages import ShardedModel


@dataclass(frozen=True)
class CommSettings:
    """How a model's parameters and gradients are communicated; None is FSDP's default."""

    bucket: int | None = None  # bytes of the largest buffer, or
    together: int = 1  # blocks in a unit
    prefetch: int | None = None  # units gathered ahead


def requested_comm(parallel: Parallel) -> CommSettings:
    """What the config sets; `auto` is FSDP's default until something is measured."""
    bucket = parallel.bucket if isinstance(parallel.bucket, int) else None
    prefetch = parallel.prefetch if isinstance(parallel.prefetch, int) else None
    return CommSettings(bucket, prefetch=prefetch)


def install_overlap(
    sharded: ShardedModel,
    prefetch: int | None,
    reductions: bool,
    timed: bool,
    part_of: Callable[[nn.Module], Any] = lambda module: None,
) -> bool:
    """Gathers `prefetch` units ahead; with `reductions`, defers those too on a CPU.

    `timed`: a timer is on, which on a CPU measures waits, so that nothing may overlap: False then.
    `part_of`: the part of the model that a module runs with, of which alone units are gathered
    ahead.
    """
    cpu = effective_device(sharded.device) == "cpu"
    if prefetch is None or sharded.mesh.size(1) == 1 or (timed and cpu):
        return False
    forward = _distinct(sharded, sharded.model.modules())
    backward = _distinct(sharded, _inner_first(sharded.model))[::-1]
    outermost = _outermost(forward)
    for index, unit in enumerate(forward):
        stop = index + 1 + prefetch
        later = forward[index + 1 : stop]
        if outermost[index] is not None:
            # It may run in backward, where its block is recomputed and later blocks are done.
            outer = outermost[index + 1 : stop]
            later = [u for u, o in zip(later, outer, strict=True) if o is outermost[index]]
        unit.set_modules_to_forward_prefetch(_within(unit, later, part_of))
    for index, unit in enumerate(backward):
        later = _within(unit, backward[index + 1 : index + 1 + prefetch], part_of)
        # Without a list FSDP prefetches one unit; one that is gathered already counts as none.
        unit.set_modules_to_backward_prefetch(later or [unit])
    # On a GPU an asynchronous gather is queued behind compute: right only without prefetch.
    for unit in forward:
        set_async_gather(unit, cpu or prefetch == 0)
    if cpu and reductions and prefetch:
        pending = _PendingReductions(prefetch)
        for unit in forward:
            for group in parameter_groups(unit):
                unit.set_custom_reduce_scatter(DeferredReduce(group, pending))
    return True


def _within(
    unit: FSDPModule, units: list[FSDPModule], part_of: Callable[[nn.Module], Any]
) -> list[FSDPModule]:
    """The units that run with the same part of the model."""
    part = part_of(unit)  # type: ignore[arg-type]
    return [other for other in units if part_of(other) == part]  # type: ignore[arg-type]


class _PendingReductions:
    """Reductions that were started and not waited for; limited, because each holds its buffer."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._works: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()

    def add(self, work: Any, output: torch.Tensor, source: torch.Tensor) -> None:
        """Adds a reduction; backward ends only when it is done."""
        # Registered each time: a failed backward would drop a single registration.
        at_end_of_backward(self.wait)
        self._works.append((work, output, source))

    def make_room(self) -> None:
        """Waits for the oldest reductions until one more may start."""
        self.wait(self._limit - 1)

    def wait(self, limit: int = 0) -> None:
        """Waits until no more than `limit` are pending."""
        while len(self._works) > limit:
            self._works.popleft()[0].wait()


class DeferredReduce(PlainBuffers, ReduceScatter):
    """One unit's reduction, complete at the end of backward; see [Note: overlap]."""

    def __init__(self, group: Any, pending: _PendingReductions) -> None:
        self._group = group
        self._pending = pending

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fills the output with this rank's slice of the reduced inputs, at once or later."""
        if not self._may_defer(output_tensor):
            self._pending.wait()  # FSDP may add to a gradient that is still being reduced
            reduce_scatter(output_tensor, input_tensor, group=group, op=op)
            return
        self._pending.make_room()
        work = reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=True)
        self._pending.add(work, output_tensor, input_tensor)

    def _may_defer(self, output: torch.Tensor) -> bool:
        group = self._group
        if is_hybrid(group) or all_reduce_hook(group) is not None:
            return False
        if output.dtype != gradient_dtype(group):
            return False
        for fsdp in group.fsdp_params:
            parameter = fsdp.sharded_param
            if not parameter.requires_grad:
                continue
            if parameter.grad is not None or has_accumulate_hooks(parameter):
                return False
        return True


def _distinct(sharded: ShardedModel, modules: Iterator[nn.Module]) -> list[FSDPModule]:
    """The units with parameters, and the model itself; the first of modules that share a unit."""
    units: dict[int, FSDPModule] = {}
    for module in modules:
        if isinstance(module, FSDPModule) and (module is sharded.model or parameter_groups(module)):
            units.setdefault(id(fsdp_state(module)), module)
    return list(units.values())


def _outermost(units: list[FSDPModule]) -> list[FSDPModule | None]:
    """For each unit the outermost one that contains it, apart from the model itself."""
    containers: dict[nn.Module, FSDPModule] = {}
    for unit in units[1:]:
        assert isinstance(unit, nn.Module)
        for inner in unit.modules():
            if inner is not unit:
                containers.setdefault(inner, unit)
    return [containers.get(unit) for unit in units]  # type: ignore[call-overload]


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order in which forwards end, children first; backward is the reverse."""
    for child in module.children():
        yield from _inner_first(child)
    yield module
