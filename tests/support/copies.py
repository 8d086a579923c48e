"""Copies in memory on ranks that take themselves for several hosts, each by a name and a folder of its own."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.checkpoint import copies as module
from shardwise.checkpoint.copies import MemoryCheckpoints
from shardwise.checkpoint.store import load_tensors, read_trainer


def state(value: float) -> dict[str, torch.Tensor]:
    """One tensor in rows over the ranks, one that all have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(60.0).reshape(12, 5) + value
    return {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "whole": torch.full((7,), value)}


def open_copies(folder: Path, hosts: list[str]) -> MemoryCheckpoints:
    os.environ |= {"SHARDWISE_MEMORY": str(folder / "memory"), "SHARDWISE_HOST": hosts[dist.get_rank()]}
    (folder / "memory").mkdir(exist_ok=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    return MemoryCheckpoints(folder / "checkpoints", dist.new_group(backend="gloo"), afresh=False)


def make(folder: Path, hosts: list[str], steps: list[int]) -> list[str]:
    """Copies of these steps, as a first start makes them, and dies after."""
    copies = open_copies(folder, hosts)
    assert copies.find(-1) is None
    copies.began(0)
    for step in steps:
        copies.save(step, state(float(step)), {"step": step}, "{}")
        assert copies._worker is not None
        copies._worker.join()
        copies.done(step + 1)
        assert not copies.busy, copies.notes()
    return copies.notes()


def go_on(folder: Path, hosts: list[str]) -> tuple[int, int, str] | None:
    """The step that a later start goes on from, what it read, and what it says; None where there is no whole copy."""
    copies = open_copies(folder, hosts)
    found = copies.find(-1)
    if found is None:
        return None
    tensors = state(-1.0)
    load_tensors(found.folder, tensors, dist.new_group(backend="gloo"), copies.reader(found))
    expected: Any = state(float(found.step))
    assert tensors["rows"].to_local().equal(expected["rows"].to_local())  # type: ignore[attr-defined]
    assert tensors["whole"].equal(expected["whole"])
    copies.began(found.step)
    return found.step, read_trainer(found.folder)["step"], copies.lost_note(found.step)


def lose_and_run_short(folder: Path, hosts: list[str], lost: list[Path]) -> tuple[Any, bool, list[str], list[str]]:
    """Goes on, loses more, and then the second rank has no room for its neighbour's part: no rank dies of it."""
    first = go_on(folder, hosts)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in lost:
            path.unlink(missing_ok=True)
    dist.barrier()
    copies = open_copies(folder, hosts)
    assert copies.find(-1) is None
    copies.began(0)
    if dist.get_rank() == 1:

        def full(*args: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        module.reserve = full
    copies.save(1, state(1.0), {"step": 1}, "{}")
    assert copies._worker is not None
    copies._worker.join()
    busy, notes = copies.busy, copies.notes()
    left = [path.name for path in copies.folder.glob("*step*")]
    copies.close()
    return first, busy, notes[1:], left


def cost(folder: Path, hosts: list[str]) -> tuple[float, float, int]:
    """Of a copy of 20M parameters with two moments: CPU seconds of the training thread, of all threads, and bytes."""
    copies = open_copies(folder, hosts)
    copies.began(0)
    mesh, count = init_device_mesh("cpu", (dist.get_world_size(),)), 60
    tensors = {f"{n}": distribute_tensor(torch.randn(1024, 1024), mesh, [Shard(0)]) for n in range(count)}
    seen = []
    for step in range(1, 5):
        dist.barrier()
        process, thread = time.process_time(), time.thread_time()
        copies.save(step, tensors, {"step": step}, "{}")
        thread = time.thread_time() - thread
        assert copies._worker is not None
        copies._worker.join()
        assert not copies.busy, copies.notes()
        seen.append((thread, time.process_time() - process))
    copies.close()
    first, second = (sum(part) / 3 for part in zip(*seen[1:], strict=True))  # the first takes its memory
    return first, second, count * 4 * 1024 * 1024 // dist.get_world_size()
