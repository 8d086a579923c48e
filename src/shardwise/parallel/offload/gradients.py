"""Gradients on their way to the update: in the fp32 they were reduced in, and off the device if their parameters are.

FSDP casts a reduced gradient to the parameter's type, so that sums over micro-batches would be rounded to bf16 each
time. Its all-reduce hook shows the fp32 buffer of a unit just before; each parameter's part of it lies where the cast
gradient lies in its own buffer, a moment later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.optim.norms import norm_of
from shardwise.optim.shards import local_of
from shardwise.parallel.offload.disk import DiskFolder, DiskTransfer
from shardwise.parallel.offload.paging import Region
from shardwise.parallel.offload.pieces import OffloadPiece, ShardSegment
from shardwise.parallel.offload.pinned_memory import aligned, host_buffer, host_buffers
from shardwise.parallel.zero.stages import ShardedModel

Take = Callable[[nn.Parameter, torch.Tensor], None]


def take_gradients(
    units: Sequence[FSDPModule], parameters: Sequence[nn.Parameter], take: Take, exact: bool
) -> None:
    """Calls `take(parameter, gradient)` for every reduced gradient, during backward; `.grad` stays None.

    `exact` takes it in fp32 before it is cast to the parameter's type.
    """
    latest: list[torch.Tensor] = []

    def reduced(buffer: torch.Tensor) -> None:
        latest[:] = [buffer]

    def accumulated(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if exact:
            cast = local_of(gradient)
            gradient = _sharded_like(
                latest[0].as_strided(cast.size(), cast.stride(), cast.storage_offset()), parameter
            )
        take(parameter, gradient)

    for unit in units if exact else []:
        unit.set_all_reduce_hook(reduced)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(accumulated)


def _sharded_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


class GradientOffloadBuffer:
    """Gradients in host memory or in a file, summed over micro-batches, with their norms."""

    def __init__(
        self, pieces: Sequence[OffloadPiece], device: torch.device, disk: DiskFolder | None
    ) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.seen: set[nn.Parameter] = set()  # parameters that have a gradient in this step
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        segments = [s for p in pieces for s in p.segments]
        self._segments: dict[nn.Parameter, list[ShardSegment]] = {}
        for segment in segments:
            self._segments.setdefault(segment.parameter, []).append(segment)
        sizes = [4 * s.shape.numel() for s in segments]
        self._regions: dict[int, Region] = {}
        self._ring: list[tuple[torch.Tensor, list[DiskTransfer]]] = []
        if disk is None:
            buffers = host_buffers(sizes, device)
            self._regions = {
                id(s): Region(b.numel(), b, changes=False)
                for s, b in zip(segments, buffers, strict=True)
            }
        else:
            file, here = disk.create("gradients.bin", sum(aligned(s) for s in sizes)), 0
            for segment, size in zip(segments, sizes, strict=True):
                self._regions[id(segment)] = Region(size, file=file, offset=here, changes=False)
                here += aligned(size)
            self._ring = [(host_buffer(aligned(max(sizes)), device), []) for _ in range(3)]

    @property
    def held(self) -> int:
        """Bytes of host memory."""
        return sum(r.size for r in self._regions.values() if r.buffer is not None) + sum(
            b.numel() for b, _ in self._ring
        )

    def region(self, segment: ShardSegment) -> Region:
        """Where a segment's gradient lies."""
        return self._regions[id(segment)]

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: torch.Tensor, last: bool) -> torch.Tensor:
        """Adds a micro-batch's gradient; returns the sum's norm (a scalar) if it is the last, for whoever asks."""
        first = parameter not in self.seen
        self.seen.add(parameter)
        squares = []
        if first and last:
            self._norms[parameter] = norm_of(gradient)
        for segment in self._segments.get(parameter, []):
            rows = gradient[segment.start : segment.stop].float()
            region = self._regions[id(segment)]
            rows = (
                self._to_host(region, rows, first)
                if region.buffer is not None
                else self._to_file(region, rows, first)
            )
            if last and not first:
                squares.append(norm_of(rows).square())
        if (
            last and not first
        ):  # an empty part too: ranks add their norms up, one for each parameter
            self._norms[parameter] = torch.stack([norm_of(gradient[:0]), *squares]).sum().sqrt()
        return self._norms[parameter] if last and parameter in self._norms else gradient

    def norm(self, sharded: ShardedModel) -> torch.Tensor:
        """The norm of all gradients, over all ranks."""
        norms = torch.stack(
            [self._norms[p] for p in sharded.parameters.values() if p in self._norms]
        )
        shard = sharded.mesh["shard"]
        if shard.size() > 1:
            squares = norms.square()
            sharded.sum_up(squares, shard.get_group())
            norms = squares.sqrt()
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        return total.float()

    def settle(self) -> None:
        """Returns when everything is in the file."""
        for _, writes in self._ring:
            _wait(writes)

    def clear(self) -> None:
        """The optimizer has stepped."""
        self.seen.clear()
        self._norms.clear()

    def _to_host(self, region: Region, rows: torch.Tensor, first: bool) -> torch.Tensor:
        assert region.buffer is not None
        home = region.buffer.view(torch.float32).view(rows.shape)
        if self.stream is None:  # a rehearsal
            rows = rows if first else rows + home
            home.copy_(rows)
            return rows
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        rows.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            if not first:
                rows = rows + home.to(self.device, non_blocking=True)
            home.copy_(rows, non_blocking=True)
        if not first:  # the sum is used on the caller's stream, for the norm
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return rows

    def _to_file(self, region: Region, rows: torch.Tensor, first: bool) -> torch.Tensor:
        assert region.file is not None
        buffer, writes = self._ring.pop(0)
        _wait(writes)
        whole = buffer[: aligned(region.size)]
        view = whole[: region.size].view(torch.float32).view(rows.shape)
        if not first:
            self.settle()
            region.file.read(region.offset, whole).wait()
            rows = rows + view.to(rows.device)
        event: Any = None
        view.copy_(rows, non_blocking=True)
        if self.stream is not None:
            event = torch.cuda.current_stream(self.device).record_event()
        self._ring.append((buffer, [region.file.write(region.offset, whole, event)]))
        return rows


def _wait(writes: list[DiskTransfer]) -> None:
    for write in writes:
        write.wait()
    writes.clear()
