"""Records of each rank and each host, for `shardwise watch`: JSON lines beside the rank's log.

metrics.jsonl is the run's durable record, written by the main rank alone. Whether one rank is slower or fuller than the
others, and whether a host runs out of memory or disk, is only visible locally; so every rank appends its own line at
log time, from values it already has, and the first rank of a host has a thread that samples the host. Nothing here
syncs with a device, and nothing here may end a run: a full disk stops these files, not training.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil

from shardwise.observe.metrics import Record

HOST_SECONDS = 5.0  # between two looks at the host: its figures change slowly, and a year of them is still small
WAITS = ("gather", "reduce")  # of a breakdown: where a rank that is early waits for the others


def rank_file(logs: Path, rank: int) -> Path:
    """Path of a rank's records; a new start removes it with the rank's log."""
    return logs / f"rank-{rank}.metrics.jsonl"


def host_file(logs: Path, rank: int) -> Path:
    """Path of a host's records, written by its first rank."""
    return logs / f"rank-{rank}.host.jsonl"


class RankFile:
    """Appends one line per report of this rank; the first identifies the process."""

    def __init__(self, logs: Path, rank: int, size: int, device: str) -> None:
        self._process = psutil.Process()
        self._cpu = self._cpu_time()
        self._lines = _Lines(rank_file(logs, rank))
        self._lines.write({
            "kind": "start", "rank": rank, "size": size, "device": device, "host": socket.gethostname(),
            "pid": os.getpid(), "began": self._process.create_time(), "time": time.time(),
        })  # fmt: skip

    def report(self, records: list[Record], waiting: float | None = None) -> None:
        """Writes this rank's measurements for these records' steps; `waiting`: fraction from pace.py."""
        if not records:
            return
        last = records[-1]
        cpu_seconds = self._cpu_time()
        tokens = sum(record["tokens"] for record in records)
        # The speed is by this rank's own clock, so the time it stands for is this rank's too, saving left out.
        seconds = tokens / last["tokens_per_second"] / len(records) if last["tokens_per_second"] else None
        line: Record = {
            "kind": "rank", "step": last["step"], "seconds": seconds and round(seconds, 6),
            "cpu_seconds": round((cpu_seconds - self._cpu) / len(records), 6), "memory_bytes": last["memory_bytes"],
            "rss_bytes": int(self._process.memory_info().rss), "time": time.time(),
        }  # fmt: skip
        if parts := last.get("breakdown"):
            line["waiting"] = round(sum(parts.get(name, 0.0) for name in WAITS), 6)
        elif waiting is not None and seconds:
            line["waiting"] = round(waiting * seconds, 6)
        self._cpu = cpu_seconds
        self._lines.write(line)

    def close(self, outcome: str) -> None:
        """Writes the last line: how this rank ended."""
        self._lines.write({"kind": "end", "outcome": outcome, "time": time.time()})
        self._lines.close()

    def _cpu_time(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class HostFigures:
    """Thread that samples this host every few seconds until it is closed."""

    def __init__(self, file: Path, folder: Path, seconds: float = HOST_SECONDS) -> None:
        self._lines = _Lines(file)
        self._folder = folder
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2)
        self._lines.close()

    def _run(self) -> None:
        psutil.cpu_percent()  # the first answer is of no interval
        before = _traffic()
        at = time.monotonic()
        while not self._stop.wait(self._seconds):
            with contextlib.suppress(OSError, psutil.Error):
                now = _traffic()
                instant = time.monotonic()
                rates = {f"{name}_per_second": round((now[name] - before[name]) / (instant - at)) for name in now}
                before, at = now, instant
                self._lines.write(host_now(self._folder) | rates)


def host_now(folder: Path) -> Record:
    """Current CPU, memory and disk (of that folder) usage of this host."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(folder))
    return {
        "kind": "host", "host": socket.gethostname(), "cpu_percent": psutil.cpu_percent(),
        "cores": psutil.cpu_count(), "ram_used_bytes": int(memory.total - memory.available),
        "ram_total_bytes": int(memory.total), "disk_used_bytes": int(disk.used), "disk_total_bytes": int(disk.total),
        "disk_free_bytes": int(disk.free), "time": time.time(),
    }  # fmt: skip


def _traffic() -> dict[str, int]:
    """Bytes of disk and network traffic since boot; without what a container hides."""
    disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
    traffic: dict[str, Any] = {}
    if disk is not None:
        traffic |= {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}
    if network is not None:
        traffic |= {"network_received": network.bytes_recv, "network_sent": network.bytes_sent}
    return traffic


class _Lines:
    """A JSON-lines file, restarted by each start; writing stops after the first failure."""

    def __init__(self, file: Path) -> None:
        self._file: Any = None
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._file = file.open("wb")

    def write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
        except (OSError, ValueError):
            self.close()

    def close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
