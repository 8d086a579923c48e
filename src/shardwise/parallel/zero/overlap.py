"""What travels beside computing: gathers that start some units ahead, and on CPUs reductions that nobody waits for.

[Note: overlap] On a GPU FSDP queues collectives on streams of their own. What it gathers ahead by itself is one unit in
backward, and in forward as much as the host is ahead of the device; lists of units make it so many in both. On a CPU
there are no streams: FSDP waits for each collective where it calls it. There
  gathers     go as asynchronous operations (FSDP asks for one where `_set_unshard_async_op` is on, and waits for its
              work where the unit is used). One unit ahead is then the least that hides anything.
  reductions  are begun and left; gloo's threads do them, and the end of backward waits for the last. FSDP goes on as if
              the result were there, so this is only where it makes nothing of it before then but a view that becomes
              the gradient: a first gradient (not one to add), of the parameter's own type, no all-reduce across
              replicas after it, no hook that takes it. Otherwise the reduction is waited for as before.
Neither the values nor the order of any sum change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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
    """How a model's parameters and gradients travel; None is FSDP's own way."""

    bucket: int | None = None  # bytes of the largest buffer, or
    together: int = 1  # blocks of a unit
    prefetch: int | None = None  # units gathered ahead


def given(parallel: Parallel) -> CommSettings:
    """What the settings say; `auto` is FSDP's own way until something is measured."""
    bucket = parallel.bucket if isinstance(parallel.bucket, int) else None
    return CommSettings(
        bucket, prefetch=parallel.prefetch if isinstance(parallel.prefetch, int) else None
    )


def install_overlap(
    sharded: ShardedModel, prefetch: int | None, reductions: bool, timed: bool
) -> None:
    """Gathers so many units ahead; on a CPU with `reductions`, lets those run beside computing too.

    `timed`: a timer is on, which on a CPU sees what is waited for, so that nothing is left to run beside.
    """
    cpu = effective_device(sharded.device) == "cpu"
    if prefetch is None or sharded.mesh.size(1) == 1 or (timed and cpu):
        return
    forward = _distinct(sharded, sharded.model.modules())
    backward = _distinct(sharded, _inner_first(sharded.model))[::-1]
    outer = _outer(forward)
    for at, unit in enumerate(forward):
        later = forward[at + 1 : at + 1 + prefetch]
        if (
            outer[at] is not None
        ):  # it may run in backward, where its block is recomputed and what follows is done with
            later = [one for n, one in enumerate(later, at + 1) if outer[n] is outer[at]]
        unit.set_modules_to_forward_prefetch(later)
    for at, unit in enumerate(backward):
        # Without a list FSDP gathers one ahead; a unit that is there already is none.
        unit.set_modules_to_backward_prefetch(backward[at + 1 : at + 1 + prefetch] or [unit])
    # On a GPU an asynchronous gather is queued behind what computes: just right where nothing shall go ahead.
    for unit in forward:
        set_async_gather(unit, cpu or prefetch == 0)
    if cpu and reductions and prefetch:
        under_way = _UnderWay(prefetch)
        for unit in forward:
            for group in parameter_groups(unit):
                unit.set_custom_reduce_scatter(LaterReduce(group, under_way))


class _UnderWay:
    """Reductions that were begun and not waited for; so many at once, because each holds its buffer."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()

    def add(self, work: Any, output: torch.Tensor, whole: torch.Tensor) -> None:
        """One more; backward ends only when it is done."""
        # Each time: after a failed backward none would be left to wait otherwise.
        at_end_of_backward(self.wait)
        self._works.append((work, output, whole))

    def make_room(self) -> None:
        """Waits for the oldest while there are as many as may be."""
        self.wait(self._most - 1)

    def wait(self, left: int = 0) -> None:
        """Until no more than `left` are under way."""
        while len(self._works) > left:
            self._works.popleft()[0].wait()


class LaterReduce(PlainBuffers, ReduceScatter):
    """One unit's reduction: begun now and there at the end of backward; see [Note: overlap]."""

    def __init__(self, group: Any, under_way: _UnderWay) -> None:
        self._group, self._under_way = group, under_way

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fills the output with this rank's slice of the reduced inputs, at once or later."""
        if not self._is_left_alone(output_tensor):
            self._under_way.wait()  # FSDP may add to a gradient that is still on its way
            reduce_scatter(output_tensor, input_tensor, group=group, op=op)
            return
        self._under_way.make_room()
        work = reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=True)
        self._under_way.add(work, output_tensor, input_tensor)

    def _is_left_alone(self, output: torch.Tensor) -> bool:
        group = self._group
        if (
            is_hybrid(group)
            or all_reduce_hook(group) is not None
            or output.dtype != gradient_dtype(group)
        ):
            return False
        parameters = [
            one.sharded_param for one in group.fsdp_params if one.sharded_param.requires_grad
        ]
        return not any(p.grad is not None or has_accumulate_hooks(p) for p in parameters)


def _distinct(sharded: ShardedModel, modules: Iterator[nn.Module]) -> list[FSDPModule]:
    """The units among them that have parameters, and the model itself; of modules that share one, the first."""
    found: dict[int, FSDPModule] = {}
    for module in modules:
        if isinstance(module, FSDPModule) and (module is sharded.model or parameter_groups(module)):
            found.setdefault(id(fsdp_state(module)), module)
    return list(found.values())


def _outer(units: list[FSDPModule]) -> list[FSDPModule | None]:
    """For each unit the outermost one that it is a part of, the model itself apart."""
    found: dict[nn.Module, FSDPModule] = {}
    for unit in units[1:]:
        assert isinstance(unit, nn.Module)
        for inside in unit.modules():
            if inside is not unit:
                found.setdefault(inside, unit)
    return [found.get(unit) for unit in units]  # type: ignore[call-overload]


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    """As forwards end: what is inside before what it is in. Backward is the reverse of it."""
    for child in module.children():
        yield from _inner_first(child)
    yield module
