"""Benchmarks the network between ranks: collectives by size, and the latency and bandwidth that fit them.

Within a node: all of its ranks. Across nodes: one rank of each node per group, all groups at once, so that a rank sees
its share of the adapters. The fit uses the formulas of `network.py`, over the ring collectives, and weights small and
large messages equally.

`python -m shardwise.distributed.link_bench FILE SIZE…` is one rank of it: it needs torchrun's variables, and rank 0
writes the result to FILE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwise.core.errors import RunFailed

RINGS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # how often the tensor goes round
MEASURED = (*RINGS, "all_to_all")
PATIENCE = 1800.0  # seconds that ranks wait for the one that measures the device
LEAST = 1e-7  # seconds per hop where the fit finds none


@dataclass(frozen=True)
class Fit:
    """One kind of link: seconds by collective and size, and the fitted latency and bandwidth."""

    ranks: int
    bandwidth: float
    latency: float
    seconds: dict[str, dict[int, float]]


def fit(ranks: int, seconds: dict[str, dict[int, float]], launch: float = 0.0) -> Fit:
    """Fits the bandwidth (per device and direction) and the latency per hop to the times, by relative error."""
    import numpy as np

    rows, ones = [], []
    for kind, times in RINGS.items():
        for nbytes, duration in seconds.get(kind, {}).items():
            left = max(duration - launch, 0.1 * duration)
            rows.append([times * (ranks - 1) / left, times * (ranks - 1) / ranks * int(nbytes) / left])
            ones.append(1.0)
    matrix, target = np.array(rows), np.array(ones)
    latency, per_byte = np.linalg.lstsq(matrix, target, rcond=None)[0]
    if latency < LEAST:  # only noise was left for it
        latency = LEAST
        per_byte = 1 / np.median(target / matrix[:, 1]) if per_byte <= 0 else per_byte
    if per_byte <= 0:  # messages too small to tell: the largest one bounds it
        per_byte = matrix[:, 1].max() ** -1
    return Fit(ranks, float(1 / per_byte), float(latency), seconds)


def measure(sizes: tuple[int, ...], launch: float, budget: float, device: Any) -> dict[str, Fit]:
    """Measures the links of an initialised process group: `within` nodes of several ranks, `across` several nodes.

    Every rank returns the same result: the slowest rank's times.
    """
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    nodes = ranks // local
    fits = {}
    if local > 1:
        # Groups are made by all ranks in the same order.
        groups = [dist.new_group(list(range(node * local, (node + 1) * local))) for node in range(nodes)]
        fits["within"] = fit(local, _times(groups[rank // local], local, sizes, budget, device), launch)
    if nodes > 1:
        groups = [dist.new_group(list(range(place, ranks, local))) for place in range(local)]
        fits["across"] = fit(nodes, _times(groups[rank % local], nodes, sizes, budget, device), launch)
    return fits


def _times(group: Any, ranks: int, sizes: tuple[int, ...], budget: float, device: Any) -> dict[str, dict[int, float]]:
    times: dict[str, dict[int, float]] = {}
    for kind in MEASURED:
        for size in sizes:
            elements = max(1, size // 4 // ranks) * ranks
            times.setdefault(kind, {})[elements * 4] = time_of(
                call_of(kind, elements, ranks, group, device), budget, device
            )
    return times


def call_of(kind: str, elements: int, ranks: int, group: Any, device: Any) -> Callable[[], Any]:
    """A callable that runs one collective of `elements` fp32 elements in total."""
    import torch
    import torch.distributed as dist

    full = torch.zeros(elements, device=device)
    part = torch.zeros(elements // ranks, device=device)
    output = torch.empty(elements, device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(output, full, group=group),
    }[kind]


def time_of(call: Callable[[], Any], budget: float, device: Any) -> float:
    """Seconds per call of the slowest rank; rank 0 decides the number of calls, which must be the same on all ranks."""
    import torch
    import torch.distributed as dist

    def run(calls: int) -> float:
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(device)
        return (time.perf_counter() - start) / calls

    run(2)  # connections are made on first use
    repeats = torch.tensor([max(2, min(200, int(budget / max(run(2), 1e-6))))], device=device)
    dist.broadcast(repeats, 0)
    best = torch.tensor([min(run(int(repeats)) for _ in range(3))], dtype=torch.float64, device=device)
    dist.all_reduce(best, dist.ReduceOp.MAX)
    return float(best)


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def join() -> Any:
    """Joins the process group of torchrun's variables: NCCL if each rank has a GPU, else gloo. Returns the device."""
    import torch
    import torch.distributed as dist

    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # torchrun's own variables say where to meet, unless a file does.
    meeting_file = os.environ.get("SHARDWISE_BENCH_MEET")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting_file}" if meeting_file else "env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=PATIENCE),
        device_id=device if cuda else None,
    )
    return device


def measure_locally(ranks: int, sizes: tuple[int, ...], launch: float, budget: float) -> dict[str, Fit]:
    """Starts ranks on this machine and returns their measurements; all of them have ended on return."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        out = Path(folder) / "result.json"
        words = [sys.executable, "-m", "shardwise.distributed.link_bench", str(out), str(launch), str(budget)]
        env = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
               "SHARDWISE_BENCH_MEET": f"{folder}/meet"}  # fmt: skip
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        started: list[subprocess.Popen[bytes]] = []
        log = Path(folder) / "log"
        try:
            with log.open("wb") as output:
                for rank in range(ranks):
                    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    command = [*words, *map(str, sizes)]
                    started.append(
                        subprocess.Popen(
                            command, env={**env, **place}, stdout=output, stderr=output, start_new_session=True
                        )
                    )
            _watch(started, log)
            stored: dict[str, Any] = json.loads(out.read_text())
            return {name: _from_json(values) for name, values in stored.items()}
        finally:
            for process in started:
                process.kill()
                process.wait()


def _watch(started: list[subprocess.Popen[bytes]], log: Path) -> None:
    while any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            break
        time.sleep(0.05)
    for rank, process in enumerate(started):
        if code := process.poll():
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            raise RunFailed(f"bench: rank {rank} of the network part ended with {code}: {last[0]}")


def as_json(fits: dict[str, Fit]) -> dict[str, Any]:
    """JSON form, for files and --json."""
    return {name: asdict(fitted) for name, fitted in fits.items()}


def _from_json(stored: dict[str, Any]) -> Fit:
    seconds = {kind: {int(size): t for size, t in times.items()} for kind, times in stored["seconds"].items()}
    return Fit(stored["ranks"], stored["bandwidth"], stored["latency"], seconds)


def _main(out: str, launch: str, budget: str, *sizes: str) -> None:
    import torch.distributed as dist

    device = join()
    fits = measure(tuple(map(int, sizes)), float(launch), float(budget), device)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(as_json(fits)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
