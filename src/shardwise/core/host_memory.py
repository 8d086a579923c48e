"""Ends a run before the kernel does: when a host's memory is nearly gone, somebody is killed without a word.

The kernel's choice may be a rank, another process of the user or the login itself. One rank of each host looks once a
second, at the limit of the control group too, in which containers and batch systems keep a job.
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
    """Bytes that can still be had, and bytes in all."""
    memory = psutil.virtual_memory()
    left, whole = int(memory.available), int(memory.total)
    try:
        limit = int((groups / "memory.max").read_text())  # "max" where there is none
        stat = dict(line.split() for line in (groups / "memory.stat").read_text().splitlines())
        used = int((groups / "memory.current").read_text()) - int(stat.get("inactive_file", 0))  # that can be dropped
        left, whole = min(left, max(0, limit - used)), min(whole, limit)
    except (OSError, ValueError):
        pass
    return left, whole


class HostMemoryWatch:
    """Looks at the host's memory; `short` is called with what to tell, then the rank ends."""

    def __init__(
        self,
        short: Callable[[str], None],
        read: Callable[[], tuple[int, int]] = host_memory,
        leave: Callable[[int], object] = os._exit,
        every: float = EVERY,
    ) -> None:
        self._short, self._read, self._leave, self._every = short, read, leave, every
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
            left, whole = self._read()
            low = low + 1 if left < max(LEAST, whole // 100) else 0
            if low >= TWICE:
                self._short(shortage(left, whole))
                sys.stderr.flush()
                self._leave(1)
                return


def shortage(left: int, whole: int) -> str:
    """What to tell: who holds most, and what to change."""
    held = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        if process.info["memory_info"] is not None:
            held.append((process.info["memory_info"].rss, process.info["pid"], process.info["name"]))
    most = ", ".join(f"{name} ({pid}) {size / 2**30:.1f} GiB" for size, pid, name in sorted(held, reverse=True)[:3])
    return (
        f"the host's memory is nearly gone: {left / 2**20:.0f} MiB of {whole / 2**30:.1f} GiB left; the run was ended "
        f"before the system would have killed a process\n    most is held by {most}\n"
        "    → fewer ranks on this host, offload less (offload.*, checkpoint.async_save: false), or a smaller "
        "train.micro_batch_size"
    )
