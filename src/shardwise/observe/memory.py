"""Monitors GPU memory fragmentation, and warns once with a remedy.

PyTorch's allocator keeps the memory it reserved and allocates pieces of it. Pieces of many sizes leave holes between
them; when no hole is large enough it frees everything and starts again, which syncs with the device (a retry), and when
that does not help the run is out of memory with memory to spare.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.observe.metrics import Record

HOLES = 0.25  # reserved but never used at the peak, as a share of what was used
FULL = 0.8  # reserved, as a share of the device: holes in an empty house hurt nobody
REMEDY = "set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, or lower train.micro_batch_size"
_STATS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "alloc_retries": "num_alloc_retries",
}


def device_memory(device: torch.device, group: dist.ProcessGroup) -> Record:
    """Allocator statistics, the maximum over the ranks; empty on a CPU."""
    if device.type != "cuda":
        return {}
    figures = pick(torch.cuda.memory_stats(device))
    largest = torch.tensor(list(figures.values()), dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(figures, largest.tolist(), strict=True))


def pick(stats: dict[str, Any]) -> dict[str, int]:
    """The allocator statistics we report; zero before the first allocation."""
    return {name: int(stats.get(key, 0)) for name, key in _STATS.items()}


class MemoryWatch:
    """Turns records into at most one warning of each kind per run."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told: set[str] = set()

    def warning(self, record: Record) -> str | None:
        """The warning for this record; None if there is none or it was given before."""
        if "reserved_peak_bytes" not in record:
            return None
        used, reserved = record["allocated_peak_bytes"], record["reserved_peak_bytes"]
        gib = f"{reserved / 2**30:.1f} GiB reserved for {used / 2**30:.1f} GiB in use at the peak"
        if record["alloc_retries"] and self._first("retries"):
            times = f"{record['alloc_retries']} time{'s' * (record['alloc_retries'] != 1)}"
            return f"the GPU's memory ran full and was sorted anew {times}, which is slow ({gib})\n  → {REMEDY}"
        if reserved > (1 + HOLES) * used and reserved > FULL * self._total and self._first("holes"):
            return f"the GPU's memory is in pieces: {gib}\n  → {REMEDY}"
        return None

    def _first(self, kind: str) -> bool:
        new = kind not in self._told
        self._told.add(kind)
        return new
