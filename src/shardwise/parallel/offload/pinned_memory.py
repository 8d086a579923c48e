"""Page-locked host memory for offloaded tensors, without waste.

PyTorch's own pinned allocator rounds every buffer up to a power of two, which doubles the cost in
the worst case. Here memory is mapped in slabs of the exact size, filled in parallel, and registered
with CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import weakref

import torch

from shardwise.core.effective_device import on_host, stands_in

SLAB = 1 << 30
ALIGNMENT = 4096  # that direct I/O requires


def aligned(size: int, to: int = ALIGNMENT) -> int:
    """The size rounded up to a multiple of `to`."""
    return -(-size // to) * to


def host_buffer(size: int, device: torch.device) -> torch.Tensor:
    """Page-aligned zeroed bytes; page-locked where the device is CUDA."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    if stands_in():
        return on_host(size)
    memory = mmap.mmap(-1, aligned(size))
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2 << 20:
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8, count=size)
    if device.type == "cuda":
        buffer.zero_()  # touched by all threads: registering alone would fault page by page
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        status = torch.cuda.cudart().cudaHostRegister(address, aligned(size), 0)
        if int(status) != 0:
            problem = f"  host memory could not be page-locked ({status}): copies will be slow"
            print(problem, file=sys.stderr)
        else:  # before the address can be given to another mapping
            weakref.finalize(memory, torch.cuda.cudart().cudaHostUnregister, address)
    return buffer


def return_freed_memory() -> None:
    """Makes the allocator return large blocks to the system as soon as they are freed.

    glibc raises its threshold until it caches blocks of up to 32 MiB. Small long-lived tensors (a
    block's input, for backward) then fill the gaps that a gathered block leaves, and the next
    gather needs new memory: 22 MB for each block of 50 MB.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD in malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)


def host_buffers(sizes: list[int], device: torch.device) -> list[torch.Tensor]:
    """A buffer for each size, aligned to 64 bytes, cut from slabs of about a gigabyte."""
    result: list[torch.Tensor] = []
    while len(result) < len(sizes):
        length = 0
        count = 0
        for size in sizes[len(result) :]:
            if count and length + size > SLAB:
                break
            length += aligned(size, 64)
            count += 1
        slab = host_buffer(length, device)
        start = 0
        for size in sizes[len(result) : len(result) + count]:
            result.append(slab[start : start + size])
            start += aligned(size, 64)
    return result
