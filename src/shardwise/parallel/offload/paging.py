"""Copies pages of offloaded state to the device and back while other work runs.

A page belongs to a piece: a range of parameters with everything their update reads and writes. Each
region of it has a home: the device, host memory, or a file. `opened` makes all regions present and
afterwards sends the changed ones home.

[Note: paging] On CUDA the host never waits for memory traffic: copies in, the work, and copies out
run on three streams that wait for each other by events, over a ring of device buffers. The two
directions of the bus run at the same time, and so do the next forward's kernels. Files add a ring
of host buffers: reads start ahead in the expected order, writes complete in the background.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.effective_device import is_host, stands_in
from shardwise.parallel.offload.disk import DiskFile, DiskTransfer
from shardwise.parallel.offload.pinned_memory import aligned, host_buffer

DEPTH = 4  # buffers in a ring: one being filled, one in use, one being emptied, one spare


@dataclass
class Region:
    """Bytes and their home: a buffer on the host or the device, or a range of a file."""

    size: int
    buffer: torch.Tensor | None = None
    file: DiskFile | None = None
    offset: int = 0
    changes: bool = True

    def on(self, device: torch.device) -> bool:
        """Whether the home can be used in place on a device."""
        if self.buffer is None or is_host(self.buffer):
            return False
        return self.buffer.device.type == device.type


@dataclass
class Page:
    """The regions of a piece and, once it was opened, the progress of its last update."""

    regions: list[Region]
    done: Any = None  # a CUDA event: updated on the device
    home: Any = None  # a CUDA event: changes copied to host memory
    writes: list[DiskTransfer] = field(default_factory=list)  # to its files, in progress

    def settle(self) -> None:
        """Returns when its files are written."""
        for transfer in self.writes:
            transfer.wait()
        self.writes = []

    @property
    def size(self) -> int:
        """Bytes of a buffer that holds the page."""
        return self.offset_of(len(self.regions))

    @property
    def has_files(self) -> bool:
        """Whether any region is in a file."""
        return any(region.file is not None for region in self.regions)

    def offset_of(self, index: int) -> int:
        """The offset of a region in a buffer that holds the page."""
        return sum(aligned(region.size) for region in self.regions[:index])

    def is_on(self, device: torch.device) -> bool:
        """Whether all regions can be used in place on a device."""
        return all(region.on(device) for region in self.regions)


@dataclass
class _PageSlot:
    """A buffer of a ring, and what must complete before it can be reused."""

    buffer: torch.Tensor
    event: Any = None
    reads: list[DiskTransfer] = field(default_factory=list)
    page: Page | None = None  # read ahead into it
    written: Page | None = None  # being written from it


class Pager:
    """Opens pages on a device, in rings of `depth` buffers."""

    def __init__(self, device: torch.device, pages: Sequence[Page], depth: int = DEPTH) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        moving = [page for page in pages if not page.is_on(device)]
        largest = max((page.size for page in moving), default=0)
        self._host: list[_PageSlot] = []
        if any(page.has_files for page in pages):
            for _ in range(depth):
                self._host.append(_PageSlot(host_buffer(largest, device)))
        self._ring: list[_PageSlot] = []
        if moving and (self.cuda or stands_in()):
            for _ in range(depth):
                buffer = torch.empty(largest, dtype=torch.uint8, device=device)
                self._ring.append(_PageSlot(buffer))
        self._next_host = 0
        self._next_ring = 0
        self._ahead: list[Page] = []  # pages still to come, in the expected order
        if self.cuda:
            self.work = torch.cuda.Stream(device)
            self._in = torch.cuda.Stream(device)
            self._out = torch.cuda.Stream(device)

    @property
    def held(self) -> dict[str, int]:
        """Bytes of the rings on the host and on the device."""
        return {
            "host": sum(s.buffer.numel() for s in self._host),
            "device": sum(s.buffer.numel() for s in self._ring),
        }

    def rings(self) -> list[torch.Tensor]:
        """The buffers on the device that pages are opened in."""
        return [slot.buffer for slot in self._ring]

    def begin(self, other: Any = None) -> None:
        """Orders what is paged from now on after the current stream (and after `other`)."""
        if self.cuda:
            self.work.wait_stream(torch.cuda.current_stream(self.device))
            if other is not None:
                self._in.wait_stream(other)

    def expect(self, pages: Sequence[Page]) -> None:
        """Sets the order in which pages will be opened; reads of the first ones start now."""
        self._ahead = [page for page in pages if page.has_files]
        for slot in self._host:
            slot.page = None
        for _ in self._host[:-1]:
            self._read_ahead()

    @contextlib.contextmanager
    def opened(self, page: Page) -> Iterator[list[torch.Tensor]]:
        """The page's regions as bytes on the device; changes go home in the background on exit."""
        host = self._file_slot(page)
        homes: list[torch.Tensor] = []
        for index, region in enumerate(page.regions):
            homes.append(self._part(host, page, index) if region.buffer is None else region.buffer)
        if not self.cuda:
            yield homes
            self._write(page, host, None)
            return
        slot = self._device_slot(page)
        tensors: list[torch.Tensor] = []
        if page.home is not None:  # with fewer pages than slots no slot's event covers this
            self._in.wait_event(page.home)
        with torch.cuda.stream(self._in):
            for index, (region, home) in enumerate(zip(page.regions, homes, strict=True)):
                tensor = home
                if not region.on(self.device):
                    tensor = self._part(slot, page, index)
                    tensor.copy_(home, non_blocking=True)
                tensors.append(tensor)
        self.work.wait_stream(self._in)
        with torch.cuda.stream(self.work):
            yield tensors
        page.done = self.work.record_event()
        if slot is None:
            return
        self._out.wait_event(page.done)
        with torch.cuda.stream(self._out):
            for region, tensor, home in zip(page.regions, tensors, homes, strict=True):
                if region.changes and not region.on(self.device):
                    home.copy_(tensor, non_blocking=True)
        event = self._out.record_event()
        slot.event = event
        page.home = event
        self._write(page, host, event)

    def finish(self) -> None:
        """Returns when every change is in its home."""
        if self.cuda:
            self.work.synchronize()
            self._out.synchronize()
        for slot in self._host:
            if slot.written is not None:
                slot.written.settle()

    def _device_slot(self, page: Page) -> _PageSlot | None:
        if page.is_on(self.device):
            return None
        slot = self._ring[self._next_ring]
        self._next_ring = (self._next_ring + 1) % len(self._ring)
        if slot.event is not None:
            self._in.wait_event(slot.event)
        return slot

    def _file_slot(self, page: Page) -> _PageSlot | None:
        """The host buffer that holds the page's file regions, fully read."""
        if not page.has_files:
            return None
        slot = next((s for s in self._host if s.page is page), None)
        if slot is None:  # not the expected page
            slot = self._start_read(page)
        else:
            self._read_ahead()
        for transfer in slot.reads:
            transfer.wait()
        slot.reads = []
        slot.page = None
        return slot

    def _read_ahead(self) -> None:
        if self._ahead:
            self._start_read(self._ahead.pop(0))

    def _start_read(self, page: Page) -> _PageSlot:
        slot = self._host[self._next_host]
        self._next_host = (self._next_host + 1) % len(self._host)
        for transfer in slot.reads:  # read ahead for a page that was not opened
            transfer.wait()
        if slot.written is not None:
            slot.written.settle()
        if slot.event is not None:
            slot.event.synchronize()
        page.settle()
        slot.page = page
        slot.reads = []
        for index, region in enumerate(page.regions):
            if region.file is not None:
                buffer = self._part(slot, page, index, padded=True)
                slot.reads.append(region.file.read(region.offset, buffer))
        return slot

    def _write(self, page: Page, host: _PageSlot | None, after: Any) -> None:
        if host is None:
            return
        host.event = after
        host.written = page
        page.writes = []
        for index, region in enumerate(page.regions):
            if region.file is not None and region.changes:
                buffer = self._part(host, page, index, padded=True)
                page.writes.append(region.file.write(region.offset, buffer, after))

    def _part(
        self, slot: _PageSlot | None, page: Page, index: int, padded: bool = False
    ) -> torch.Tensor:
        """The bytes of a region in a slot; `padded` to full pages of memory."""
        assert slot is not None
        size = page.regions[index].size
        if padded:
            size = aligned(size)
        start = page.offset_of(index)
        return slot.buffer[start : start + size]
