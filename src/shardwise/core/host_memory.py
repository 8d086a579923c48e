"""Ends a run before the host runs out of memory, when the kernel would kill a process without a message.

The kernel's choice may be a rank, another process of the user or the login itself. One rank of each host checks once a
second, also against the limit of the control group in which containers and batch systems run.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

EVERY = 1.0
LEAST = 256 << 20  # bytes that must be left, or 1% of all
TWICE = 2  # looks in a row: a peak that passes is none of ours


def host_memory(groups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Bytes still available, and bytes in total."""
    memory = psutil.virtual_memory()
    available, total = int(memory.available), int(memory.total)
    try:
        limit = int((groups / "memory.max").read_text())  # "max" where there is none
        stat = dict(line.split() for line in (groups / "memory.stat").read_text().splitlines())
        used = int((groups / "memory.current").read_text()) - int(stat.get("inactive_file", 0))  # that can be dropped
        available, total = min(available, max(0, limit - used)), min(total, limit)
    except (OSError, ValueError):
        pass
    return available, total


class HostMemoryWatch:
    """Monitors the host's memory; calls `short` with a message, then ends the rank."""

    def __init__(
        self,
        short: Callable[[str], None],
        read: Callable[[], tuple[int, int]] = host_memory,
        leave: Callable[[int], object] = os._exit,
        every: float = EVERY,
    ) -> None:
        self._short = short
        self._read = read
        self._leave = leave
        self._every = every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-memory", daemon=True)

    def __enter__(self) -> HostMemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(2)

    def _run(self) -> None:
        low = 0
        while not self._over.wait(self._every):
            available, total = self._read()
            low = low + 1 if available < max(LEAST, total // 100) else 0
            if low >= TWICE:
                self._short(shortage(available, total))
                sys.stderr.flush()
                self._leave(1)
                return


def shortage(available: int, total: int) -> str:
    """Message for the user: the largest processes, and what to change."""
    processes = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        if process.info["memory_info"] is not None:
            processes.append((process.info["memory_info"].rss, process.info["pid"], process.info["name"]))
    largest = ", ".join(
        f"{name} ({pid}) {size / 2**30:.1f} GiB" for size, pid, name in sorted(processes, reverse=True)[:3]
    )
    left = f"{available / 2**20:.0f} MiB of {total / 2**30:.1f} GiB left"
    return (
        f"the host's memory is nearly gone: {left}; the run was ended "
        f"before the system would have killed a process\n    most is held by {largest}\n"
        "    → fewer ranks on this host, offload less (offload.*, advanced.async_save: false), or a smaller "
        "train.micro_batch_size"
    )
