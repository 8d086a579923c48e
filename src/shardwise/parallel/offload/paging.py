"""Brings what lies off the device to it and back, a piece at a time, while other work goes on.

A piece is updated as one: a range of parameters with everything their update reads and writes. Each region of it has a
home: the device, host memory, or a file. `open` makes all regions present, `close` sends the changed ones home.

[Note: paging] On CUDA nothing here waits on the host's side for memory traffic: copies in, the work, and copies out run
on three streams that wait for each other by events, over a ring of device buffers. The two directions of the bus run at
the same time, and so do the next forward's kernels. Files add a ring of host buffers: reads are started ahead in
the order that is expected, writes end behind.
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

DEPTH = 4  # buffers in a ring: one is filled, one worked on, one emptied, one to spare


@dataclass
class Region:
    """Bytes and their home: a buffer (on the host or the device), or a range of a file."""

    size: int
    buffer: torch.Tensor | None = None
    file: DiskFile | None = None
    offset: int = 0
    changes: bool = True

    def on(self, device: torch.device) -> bool:
        """Whether the home can be worked on in place."""
        return (
            self.buffer is not None
            and self.buffer.device.type == device.type
            and not is_host(self.buffer)
        )


@dataclass
class Page:
    """The regions of a piece and, once it was opened, when its last update is done."""

    regions: list[Region]
    done: Any = None  # a CUDA event: it is updated, on the device
    home: Any = None  # a CUDA event: its changes are in host memory
    writes: list[DiskTransfer] = field(default_factory=list)  # to its files, under way

    def settle(self) -> None:
        """Returns when its files are written."""
        for transfer in self.writes:
            transfer.wait()
        self.writes = []

    @property
    def size(self) -> int:
        return sum(aligned(r.size) for r in self.regions)


@dataclass
class _PageSlot:
    """A buffer of a ring, and what must end before it can be used again."""

    buffer: torch.Tensor
    event: Any = None
    reads: list[DiskTransfer] = field(default_factory=list)
    page: Page | None = None  # what was read ahead into it
    written: Page | None = None  # what is written from it


class Pager:
    """Opens pages on a device; `largest` is the size of the largest."""

    def __init__(self, device: torch.device, pages: Sequence[Page], depth: int = DEPTH) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        moving = [p for p in pages if any(not r.on(device) for r in p.regions)]
        filed = [p for p in pages if any(r.file is not None for r in p.regions)]
        largest = max((p.size for p in moving), default=0)
        self._host = (
            [_PageSlot(host_buffer(largest, device)) for _ in range(depth)] if filed else []
        )
        self._ring = [_PageSlot(torch.empty(largest, dtype=torch.uint8, device=device)) for _ in range(depth)] if (
            (self.cuda or stands_in()) and moving) else []  # fmt: skip
        self._next_host = self._next_ring = 0
        self._ahead: list[Page] = []  # pages still to come, in the expected order
        if self.cuda:
            self.work = torch.cuda.Stream(device)
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @property
    def held(self) -> dict[str, int]:
        """Bytes of the rings, by where they lie."""
        return {
            "host": sum(s.buffer.numel() for s in self._host),
            "device": sum(s.buffer.numel() for s in self._ring),
        }

    def rings(self) -> list[torch.Tensor]:
        """The buffers on the device that pages are opened in."""
        return [slot.buffer for slot in self._ring]

    def begin(self, other: Any = None) -> None:
        """The work of this thread's current stream (and another) comes before what is paged from now on."""
        if self.cuda:
            self.work.wait_stream(torch.cuda.current_stream(self.device))
            if other is not None:
                self._in.wait_stream(other)

    def expect(self, pages: Sequence[Page]) -> None:
        """The order in which pages will be opened; reads of the first ones start now."""
        self._ahead = [p for p in pages if any(r.file is not None for r in p.regions)]
        for slot in self._host:
            slot.page = None
        for _ in self._host[:-1]:
            self._read_ahead()

    @contextlib.contextmanager
    def opened(self, page: Page) -> Iterator[list[torch.Tensor]]:
        """The page's regions as bytes on the device, in order; on leaving, changes go home in the background."""
        host = self._file_slot(page)
        if not self.cuda:
            yield [
                r.buffer if r.buffer is not None else self._part(host, page, i)
                for i, r in enumerate(page.regions)
            ]
            self._write(page, host, None)
            return
        slot = self._device_slot(page)
        tensors: list[torch.Tensor] = []
        if page.home is not None:  # with fewer pages than slots no slot's event says so
            self._in.wait_event(page.home)
        with torch.cuda.stream(self._in):
            for index, region in enumerate(page.regions):
                if region.on(self.device):
                    assert region.buffer is not None
                    tensors.append(region.buffer)
                    continue
                target = self._part(slot, page, index)
                source = (
                    region.buffer if region.buffer is not None else self._part(host, page, index)
                )
                target.copy_(source, non_blocking=True)
                tensors.append(target)
        self.work.wait_stream(self._in)
        with torch.cuda.stream(self.work):
            yield tensors
        page.done = self.work.record_event()
        if slot is None:
            return
        self._out.wait_event(page.done)
        with torch.cuda.stream(self._out):
            for region, tensor, index in zip(
                page.regions, tensors, range(len(tensors)), strict=True
            ):
                if region.changes and not region.on(self.device):
                    home = (
                        region.buffer
                        if region.buffer is not None
                        else self._part(host, page, index)
                    )
                    home.copy_(tensor, non_blocking=True)
        slot.event = page.home = self._out.record_event()
        self._write(page, host, slot.event)

    def finish(self) -> None:
        """Returns when every change is home."""
        if self.cuda:
            self.work.synchronize()
            self._out.synchronize()
        for slot in self._host:
            if slot.written is not None:
                slot.written.settle()

    def _device_slot(self, page: Page) -> _PageSlot | None:
        if all(r.on(self.device) for r in page.regions):
            return None
        slot = self._ring[self._next_ring]
        self._next_ring = (self._next_ring + 1) % len(self._ring)
        if slot.event is not None:
            self._in.wait_event(slot.event)
        return slot

    def _file_slot(self, page: Page) -> _PageSlot | None:
        """The host buffer that holds the page's file regions, its reads ended."""
        if not any(r.file is not None for r in page.regions):
            return None
        slot = next((s for s in self._host if s.page is page), None)
        if slot is None:  # not the page that was expected
            slot = self._start_read(page)
        else:
            self._read_ahead()
        for transfer in slot.reads:
            transfer.wait()
        slot.reads, slot.page = [], None
        return slot

    def _read_ahead(self) -> None:
        if self._ahead:
            self._start_read(self._ahead.pop(0))

    def _start_read(self, page: Page) -> _PageSlot:
        slot = self._host[self._next_host]
        self._next_host = (self._next_host + 1) % len(self._host)
        for transfer in slot.reads:  # it was read ahead for a page that did not come
            transfer.wait()
        if slot.written is not None:
            slot.written.settle()
        if slot.event is not None:
            slot.event.synchronize()
        page.settle()
        slot.page = page
        slot.reads = [
            r.file.read(r.offset, self._part(slot, page, i, whole=True))
            for i, r in enumerate(page.regions) if r.file is not None
        ]  # fmt: skip
        return slot

    def _write(self, page: Page, host: _PageSlot | None, after: Any) -> None:
        if host is None:
            return
        host.event, host.written = after, page
        page.writes = [
            r.file.write(r.offset, self._part(host, page, i, whole=True), after)
            for i, r in enumerate(page.regions) if r.file is not None and r.changes
        ]  # fmt: skip

    def _part(
        self, slot: _PageSlot | None, page: Page, index: int, whole: bool = False
    ) -> torch.Tensor:
        assert slot is not None
        start = sum(aligned(r.size) for r in page.regions[:index])
        size = page.regions[index].size
        return slot.buffer[start : start + (aligned(size) if whole else size)]
