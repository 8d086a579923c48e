"""Intercepts reduced gradients: in the fp32 they were reduced in, and offloaded with parameters.

FSDP casts a reduced gradient to the parameter's type, so that sums over micro-batches would be
rounded to bf16 each time. Its all-reduce hook exposes the fp32 buffer of a unit just before; each
parameter's part of it is at the offset of the cast gradient in its own buffer, a moment later.
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

GradientHook = Callable[[nn.Parameter, torch.Tensor], None]
FILE_BUFFERS = 3  # in the ring that gradients pass through to a file


def take_gradients(
    units: Sequence[FSDPModule],
    parameters: Sequence[nn.Parameter],
    take: GradientHook,
    exact: bool,
) -> None:
    """Calls `take(parameter, gradient)` for each reduced gradient in backward; `.grad` stays None.

    `exact` passes it in fp32, before the cast to the parameter's type.
    """
    latest: list[torch.Tensor] = []

    def reduced(buffer: torch.Tensor) -> None:
        latest[:] = [buffer]

    def accumulated(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        gradient = parameter.grad
        parameter.grad = None
        if exact:
            cast = local_of(gradient)
            part = latest[0].as_strided(cast.size(), cast.stride(), cast.storage_offset())
            gradient = _sharded_like(part, parameter)
        take(parameter, gradient)

    if exact:
        for unit in units:
            unit.set_all_reduce_hook(reduced)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(accumulated)


def _sharded_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class GradientOffloadBuffer:
    """Gradients in host memory or in a file, summed over micro-batches, with their norms."""

    def __init__(
        self, pieces: Sequence[OffloadPiece], device: torch.device, disk: DiskFolder | None
    ) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.seen: set[nn.Parameter] = set()  # parameters that have a gradient in this step
        self._norms: dict[nn.Parameter, torch.Tensor] = {}
        segments: list[ShardSegment] = []
        for piece in pieces:
            segments += piece.segments
        self._segments: dict[nn.Parameter, list[ShardSegment]] = {}
        for segment in segments:
            self._segments.setdefault(segment.parameter, []).append(segment)
        sizes = [4 * s.shape.numel() for s in segments]
        self._regions: dict[int, Region] = {}
        self._ring: list[tuple[torch.Tensor, list[DiskTransfer]]] = []
        if disk is None:
            for segment, buffer in zip(segments, host_buffers(sizes, device), strict=True):
                self._regions[id(segment)] = Region(buffer.numel(), buffer, changes=False)
            return
        file = disk.create("gradients.bin", sum(map(aligned, sizes)))
        offset = 0
        for segment, size in zip(segments, sizes, strict=True):
            self._regions[id(segment)] = Region(size, file=file, offset=offset, changes=False)
            offset += aligned(size)
        for _ in range(FILE_BUFFERS):
            self._ring.append((host_buffer(aligned(max(sizes)), device), []))

    @property
    def held(self) -> int:
        """Bytes of host memory that gradients and buffers take."""
        total = sum(buffer.numel() for buffer, _ in self._ring)
        for region in self._regions.values():
            if region.buffer is not None:
                total += region.size
        return total

    def region(self, segment: ShardSegment) -> Region:
        """The memory or the file range of a segment's gradient."""
        return self._regions[id(segment)]

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: torch.Tensor, last: bool) -> torch.Tensor:
        """Adds a micro-batch's gradient; after the last one, returns the norm of the sum."""
        first = parameter not in self.seen
        self.seen.add(parameter)
        squares = []
        if first and last:
            self._norms[parameter] = norm_of(gradient)
        for segment in self._segments.get(parameter, []):
            rows = gradient[segment.start : segment.stop].float()
            region = self._regions[id(segment)]
            if region.buffer is not None:
                rows = self._to_host(region, rows, first)
            else:
                rows = self._to_file(region, rows, first)
            if last and not first:
                squares.append(norm_of(rows).square())
        if last and not first:
            # Of an empty shard too: ranks add up one norm per parameter.
            self._norms[parameter] = torch.stack([norm_of(gradient[:0]), *squares]).sum().sqrt()
        return self._norms[parameter] if last and parameter in self._norms else gradient

    def squares(self) -> dict[nn.Parameter, torch.Tensor]:
        """The squared norm of this rank's part of each complete gradient."""
        return {parameter: norm.square() for parameter, norm in self._norms.items()}

    def settle(self) -> None:
        """Returns when everything is in the file."""
        for _, writes in self._ring:
            _wait(writes)

    def clear(self) -> None:
        """Starts a new step, after the optimizer's."""
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
        pages = buffer[: aligned(region.size)]
        view = pages[: region.size].view(torch.float32).view(rows.shape)
        if not first:
            self.settle()
            region.file.read(region.offset, pages).wait()
            rows = rows + view.to(rows.device)
        event: Any = None
        view.copy_(rows, non_blocking=True)
        if self.stream is not None:
            event = torch.cuda.current_stream(self.device).record_event()
        self._ring.append((buffer, [region.file.write(region.offset, pages, event)]))
        return rows


def _wait(writes: list[DiskTransfer]) -> None:
    for write in writes:
        write.wait()
    writes.clear()
