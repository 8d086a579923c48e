"""Stage 3's parameter shards off the device, in host memory or in files, fetched for each gather.

FSDP asks a local shard that has `fsdp_pre_all_gather` for the tensors to gather: in forward, in
backward, when it prefetches. So the shards in the model are stubs (the right shape over one element
of memory), and the real ones are stored here, one blob per unit. Units are gathered in the same
order in every step: while one is used, the next is fetched.
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

AHEAD = 2  # units fetched before they are needed


@dataclass
class OffloadedShard:
    """One parameter's shard: its offset in the unit's blob, and its shape.

    `padded` is its shape in the blob, as FSDP gathers it.
    """

    parameter: nn.Parameter
    offset: int
    padded: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the padded shard."""
        return torch.Size(self.padded).numel() * self.parameter.dtype.itemsize


@dataclass(eq=False)
class OffloadUnit:
    """A unit's blob, the pages whose updates change it, and the progress of its fetch."""

    shards: list[OffloadedShard]
    home: Region
    pages: list[Page] = field(default_factory=list)
    served: int = 0  # parameters returned to FSDP since it was last fetched
    blob: torch.Tensor | None = None  # on the device
    fetched: Any = None  # an event, on CUDA
    reading: DiskTransfer | None = None
    turn: int = -1  # the buffer of the ring that it is read into


class ParameterOffload:
    """Holds the shards of all units; create it after `stub_out`, before the model is filled."""

    def __init__(
        self, units: Sequence[FSDPModule], device: torch.device, disk: DiskFolder | None
    ) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.units: list[OffloadUnit] = []
        self._of: dict[nn.Parameter, tuple[OffloadUnit, OffloadedShard]] = {}
        for unit in units:
            fsdp_params: list[Any] = []
            for group in parameter_groups(unit):
                fsdp_params += group.fsdp_params
            if fsdp_params:
                self._add_unit(fsdp_params)
        sizes = [u.home.size for u in self.units]
        staging = 0
        if disk is None:
            for offloaded, buffer in zip(self.units, host_buffers(sizes, device), strict=True):
                offloaded.home.buffer = buffer
        else:
            file = disk.create("parameters.bin", sum(sizes))
            offset = 0
            for offloaded in self.units:
                offloaded.home.file = file
                offloaded.home.offset = offset
                offset += offloaded.home.size
            # A ring is enough: when a unit is needed, the previous one is already in a gather.
            staging = AHEAD + 2
        self._ring = [host_buffer(max(sizes), device) for _ in range(staging)]
        self._busy: list[Any] = [None] * staging  # events of copies out of the ring
        self._turn = 0
        self._in_ring: list[OffloadUnit | None] = [None] * staging
        # The order of units in the last step (True) and in the last evaluation (False).
        self._orders: dict[bool, list[OffloadUnit]] = {True: [], False: []}
        self._seen: list[OffloadUnit] = []  # in this step or evaluation
        self._training = True
        self._stream = torch.cuda.Stream(device) if self.cuda else None

    def _add_unit(self, fsdp_params: list[Any]) -> None:
        shards: list[OffloadedShard] = []
        offset = 0
        for fsdp in fsdp_params:
            parameter = fsdp.sharded_param
            shape = tuple(local_of(parameter).shape)
            padded = tuple(fsdp.padded_sharded_param_size)
            shard = OffloadedShard(parameter, offset, padded, shape)
            shards.append(shard)
            offset += aligned(shard.size)
        unit = OffloadUnit(shards, Region(offset))
        self.units.append(unit)
        for fsdp, shard in zip(fsdp_params, shards, strict=True):
            self._of[shard.parameter] = (unit, shard)
            self._install_stub(fsdp, unit, shard)

    @property
    def held(self) -> int:
        """Bytes of host memory that shards and buffers take."""
        total = sum(buffer.numel() for buffer in self._ring)
        for unit in self.units:
            if unit.home.buffer is not None:
                total += unit.home.size
        return total

    def view(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter's shard in its home, to be read or written in place."""
        unit, shard = self._of[parameter]
        size = torch.Size(shard.shape).numel() * parameter.dtype.itemsize
        data = self._home(unit)[shard.offset : shard.offset + size]
        return data.view(parameter.dtype).view(shard.shape)

    def region(self, parameter: nn.Parameter, start: int, stop: int) -> Region:
        """Rows of a shard as a region of a page; they must begin on a page of memory."""
        unit, shard = self._of[parameter]
        row = torch.Size(shard.shape[1:]).numel() * parameter.dtype.itemsize
        first = shard.offset + start * row
        size = (stop - start) * row
        if unit.home.buffer is not None:
            return Region(size, unit.home.buffer[first : first + size])
        return Region(size, file=unit.home.file, offset=unit.home.offset + first)

    def changed_by(self, parameter: nn.Parameter, page: Page) -> None:
        """Records that updating this page writes rows of the parameter."""
        self._of[parameter][0].pages.append(page)

    def renew(self) -> None:
        """Ends a step or an evaluation: drops stale prefetches, and saves the order of units."""
        if self._seen:
            self._orders[self._training] = self._seen
            self._seen = []
        for unit in self.units:
            self._drop(unit)

    def flush(self) -> None:
        """Makes in-place writes to the homes visible to fetches."""
        file = self.units[0].home.file
        if file is not None:
            file.flush()

    def _home(self, unit: OffloadUnit) -> torch.Tensor:
        if unit.home.buffer is not None:
            return unit.home.buffer
        assert unit.home.file is not None
        return unit.home.file.mapped(unit.home.offset, unit.home.size)

    def _install_stub(self, fsdp: Any, unit: OffloadUnit, shard: OffloadedShard) -> None:
        """Replaces FSDP's shard of a parameter by a stub that fetches the real one."""
        parameter = fsdp.sharded_param
        stub: Any = torch.empty(1, dtype=parameter.dtype, device=self.device).expand(shard.shape)

        def pre_all_gather(
            mesh: Any, size: Any, stride: Any, module: Any, policy: Any
        ) -> tuple[Any, Any]:
            return (self._serve(unit, shard, policy.param_dtype or parameter.dtype),), None

        def post_all_gather(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
            return None if out is not None else (outputs[0], ())

        stub.fsdp_pre_all_gather = pre_all_gather
        stub.fsdp_post_all_gather = post_all_gather
        # The same memory, or FSDP would pad (and so copy) a shard with fewer rows than others.
        replace_shard(fsdp, stub, stub.as_strided((torch.Size(shard.padded).numel(),), (0,)))

    def _serve(self, unit: OffloadUnit, shard: OffloadedShard, dtype: torch.dtype) -> torch.Tensor:
        if unit.served == 0:
            self._wait_for(unit)
        unit.served += 1
        assert unit.blob is not None
        data = unit.blob[shard.offset : shard.offset + shard.size]
        data = data.view(shard.parameter.dtype).view(shard.padded)
        if unit.served == len(unit.shards):
            self._drop(unit)
        return data.to(dtype) if data.is_floating_point() else data

    def _wait_for(self, unit: OffloadUnit) -> None:
        """Waits until a unit is fetched, and starts to fetch those that come after it."""
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
        position = len(self._seen)
        order = self._orders[self._training]
        if order[position - 1 : position] == [unit]:
            for following in order[position : position + AHEAD]:
                if following.blob is None:
                    self._fetch(following)

    def _fetch(self, unit: OffloadUnit) -> None:
        """Starts to copy a unit to the device; on a CPU, host memory is used in place."""
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
        turn = self._turn
        self._turn = (turn + 1) % len(self._ring)
        if self._busy[turn] is not None:
            self._busy[turn].synchronize()
        displaced = self._in_ring[turn]
        if displaced is not None and displaced.turn == turn:
            self._drop(displaced)  # prefetched and not used
        self._in_ring[turn] = unit
        unit.blob = self._ring[turn][: unit.home.size]
        unit.turn = turn
        unit.reading = file.read(unit.home.offset, unit.blob)

    def _copy_in(self, unit: OffloadUnit, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            unit.blob = torch.empty(unit.home.size, dtype=torch.uint8, device=self.device)
            unit.blob.copy_(source, non_blocking=True)
            unit.fetched = self._stream.record_event()  # type: ignore[union-attr]

    def _drop(self, unit: OffloadUnit) -> None:
        if unit.reading is not None:
            unit.reading.wait()
        unit.served = 0
        unit.blob = None
        unit.fetched = None
        unit.reading = None
        unit.turn = -1


def stub_out(model: nn.Module, device: torch.device) -> None:
    """Moves a model on `meta` to a device; its sharded parameters get no memory of their own."""

    def stub(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and tensor.is_meta:
            element = torch.empty(1, dtype=tensor.dtype, device=device)
            part = element.expand(local_tensor(tensor).shape)
            return DTensor(part, spec_of(tensor), requires_grad=tensor.requires_grad)
        return tensor.to(device)

    model._apply(stub)
