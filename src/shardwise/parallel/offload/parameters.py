"""The shards of the parameters off the device, at stage 3: in host memory or in files, brought in for each gather.

FSDP asks a local shard that has `fsdp_pre_all_gather` for what to gather: in forward, in backward, when it prefetches.
So the shards in the model are stubs (the right shape over one element of memory), and the real ones lie here, one
blob per unit. The order in which units are asked for is the same in every step: while one is used, the next is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.core.compat.torch_private import (
    local_tensor,
    parameter_groups,
    replace_shard,
    spec_of,
)
from shardwise.optim.shards import local_of
from shardwise.parallel.offload.disk import DiskFile, DiskFolder, DiskTransfer
from shardwise.parallel.offload.paging import Page, Region
from shardwise.parallel.offload.pinned_memory import aligned, host_buffer, host_buffers

AHEAD = 2  # units fetched before they are asked for


@dataclass
class OffloadedShard:
    """One parameter's shard: its place in the unit's blob, and its shape there (padded as FSDP gathers it) and here."""

    parameter: nn.Parameter
    offset: int
    padded: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.padded).numel() * self.parameter.dtype.itemsize


@dataclass(eq=False)
class OffloadUnit:
    """A unit's blob, and what changes it."""

    shards: list[OffloadedShard]
    home: Region
    pages: list[Page] = field(default_factory=list)
    served: int = 0  # parameters handed out since it was last fetched
    blob: torch.Tensor | None = None  # on the device, being handed out
    fetched: Any = None  # an event, on CUDA
    reading: DiskTransfer | None = None
    turn: int = -1  # which buffer of the ring it is read into


class ParameterOffload:
    """Holds the shards of all units; made after `stub_out`, before the model is filled."""

    def __init__(
        self, units: Sequence[FSDPModule], device: torch.device, disk: DiskFolder | None
    ) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.units: list[OffloadUnit] = []
        self._of: dict[nn.Parameter, tuple[OffloadUnit, OffloadedShard]] = {}
        groups = [
            g for g in ([p for n in parameter_groups(u) for p in n.fsdp_params] for u in units) if g
        ]
        for group in groups:
            shards, at = [], 0
            for fsdp in group:
                parameter = fsdp.sharded_param
                shape = tuple(local_of(parameter).shape)
                shards.append(
                    OffloadedShard(parameter, at, tuple(fsdp.padded_sharded_param_size), shape)
                )
                at += aligned(shards[-1].size)
            unit = OffloadUnit(shards, Region(at))
            self.units.append(unit)
            self._of |= {s.parameter: (unit, s) for s in shards}
            for fsdp, shard in zip(group, shards, strict=True):
                self._stand_in(fsdp, unit, shard)
        sizes = [u.home.size for u in self.units]
        if disk is None:
            for unit, buffer in zip(self.units, host_buffers(sizes, device), strict=True):
                unit.home.buffer = buffer
        else:
            file, at = disk.create("parameters.bin", sum(sizes)), 0
            for unit in self.units:
                unit.home.file, unit.home.offset = file, at
                at += unit.home.size
        # On the host's side a ring does: when a unit is asked for, the one before it has been copied into a gather.
        staging = AHEAD + 2 if disk is not None else 0
        self._ring = [host_buffer(max(sizes), device) for _ in range(staging)]
        self._busy: list[Any] = [None] * staging  # events of copies out of the ring
        self._turn = 0
        self._in_ring: list[OffloadUnit | None] = [None] * staging
        self._orders: dict[bool, list[OffloadUnit]] = {
            True: [],
            False: [],
        }  # of the last step, and of the last evaluation
        self._seen: list[OffloadUnit] = []  # in this one
        self._training = True
        self._stream = torch.cuda.Stream(device) if self.cuda else None

    @property
    def held(self) -> int:
        """Bytes of host memory."""
        return sum(u.home.size for u in self.units if u.home.buffer is not None) + sum(
            b.numel() for b in self._ring
        )

    def view(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's shard where it lives, to be read or written in place."""
        unit, shard = self._of[parameter]
        count = torch.Size(shard.shape).numel() * parameter.dtype.itemsize
        return (
            self._home(unit)[shard.offset : shard.offset + count]
            .view(parameter.dtype)
            .view(shard.shape)
        )

    def region(self, parameter: nn.Parameter, start: int, stop: int) -> Region:
        """Some rows of a shard, for a page; they must begin on a page of memory."""
        unit, shard = self._of[parameter]
        row = torch.Size(shard.shape[1:]).numel() * parameter.dtype.itemsize
        first, size = shard.offset + start * row, (stop - start) * row
        if unit.home.buffer is not None:
            return Region(size, unit.home.buffer[first : first + size])
        return Region(size, file=unit.home.file, offset=unit.home.offset + first)

    def changed_by(self, parameter: nn.Parameter, page: Page) -> None:
        """Tells that updating this page writes rows of the parameter."""
        self._of[parameter][0].pages.append(page)

    def renew(self) -> None:
        """A step or an evaluation ends: what was fetched ahead is stale, and the order for the next is known."""
        if self._seen:
            self._orders[self._training], self._seen = self._seen, []
        for unit in self.units:
            self._drop(unit)

    def flush(self) -> None:
        """After the homes were written in place."""
        if (file := self.units[0].home.file) is not None:
            file.flush()

    def _home(self, unit: OffloadUnit) -> torch.Tensor:
        if unit.home.buffer is not None:
            return unit.home.buffer
        assert unit.home.file is not None
        return unit.home.file.mapped(unit.home.offset, unit.home.size)

    def _stand_in(self, fsdp: Any, unit: OffloadUnit, shard: OffloadedShard) -> None:
        """Lets FSDP ask us for this parameter's shard."""
        parameter = fsdp.sharded_param
        stub: Any = torch.empty(1, dtype=parameter.dtype, device=self.device).expand(shard.shape)

        def pre_all_gather(
            mesh: Any, size: Any, stride: Any, module: Any, policy: Any
        ) -> tuple[Any, Any]:
            return (self._ask(unit, shard, policy.param_dtype or parameter.dtype),), None

        def post_all_gather(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
            return None if out is not None else (outputs[0], ())

        stub.fsdp_pre_all_gather, stub.fsdp_post_all_gather = pre_all_gather, post_all_gather
        # The same memory, or FSDP would pad (and so copy) a shard with fewer rows than others.
        replace_shard(fsdp, stub, stub.as_strided((torch.Size(shard.padded).numel(),), (0,)))

    def _ask(self, unit: OffloadUnit, shard: OffloadedShard, dtype: torch.dtype) -> torch.Tensor:
        if unit.served == 0:
            self._arrive(unit)
        unit.served += 1
        assert unit.blob is not None
        data = (
            unit.blob[shard.offset : shard.offset + shard.size]
            .view(shard.parameter.dtype)
            .view(shard.padded)
        )
        if unit.served == len(unit.shards):
            self._drop(unit)
        return data.to(dtype) if data.is_floating_point() else data

    def _arrive(self, unit: OffloadUnit) -> None:
        """Waits for a unit, and starts to fetch those that come after it."""
        if not self._seen:
            self._training = torch.is_grad_enabled()
        self._seen.append(unit)
        if unit.blob is None:
            self._fetch(unit)
        if unit.reading is not None:
            unit.reading.wait()
            unit.reading = None
            if self.cuda:
                assert unit.blob is not None
                self._copy_in(unit, unit.blob)
                self._busy[unit.turn] = unit.fetched
        if unit.fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(unit.fetched)
            assert unit.blob is not None
            unit.blob.record_stream(torch.cuda.current_stream(self.device))
        position, order = len(self._seen), self._orders[self._training]
        if order[position - 1 : position] == [unit]:
            for following in order[position : position + AHEAD]:
                if following.blob is None:
                    self._fetch(following)

    def _fetch(self, unit: OffloadUnit) -> None:
        """Starts to bring a unit to the device; on a CPU with states in host memory there is nothing to do."""
        for page in unit.pages:
            page.settle()
        if unit.home.file is None and not self.cuda:
            unit.blob = unit.home.buffer
            return
        if unit.home.file is not None:
            self._read(unit.home.file, unit)
            return
        assert unit.home.buffer is not None and self._stream is not None
        for page in unit.pages:
            if page.home is not None:
                self._stream.wait_event(page.home)
        self._copy_in(unit, unit.home.buffer)

    def _read(self, file: DiskFile, unit: OffloadUnit) -> None:
        turn, self._turn = self._turn, (self._turn + 1) % len(self._ring)
        if self._busy[turn] is not None:
            self._busy[turn].synchronize()
        if (displaced := self._in_ring[turn]) is not None and displaced.turn == turn:
            self._drop(displaced)  # fetched ahead, and not asked for
        self._in_ring[turn] = unit
        unit.blob, unit.turn = self._ring[turn][: unit.home.size], turn
        unit.reading = file.read(unit.home.offset, unit.blob)

    def _copy_in(self, unit: OffloadUnit, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            unit.blob = torch.empty(unit.home.size, dtype=torch.uint8, device=self.device)
            unit.blob.copy_(source, non_blocking=True)
            unit.fetched = self._stream.record_event()  # type: ignore[union-attr]

    def _drop(self, unit: OffloadUnit) -> None:
        if unit.reading is not None:
            unit.reading.wait()
        unit.served, unit.blob, unit.fetched, unit.reading, unit.turn = 0, None, None, None, -1


def stub_out(model: nn.Module, device: torch.device) -> None:
    """Gives the sharded parameters of a model on `meta` a device, but no memory; other tensors are moved."""

    def stub(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and tensor.is_meta:
            part = torch.empty(1, dtype=tensor.dtype, device=device).expand(
                local_tensor(tensor).shape
            )
            return DTensor(part, spec_of(tensor), requires_grad=tensor.requires_grad)
        return tensor.to(device)

    model._apply(stub)
