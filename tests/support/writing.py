"""States divided over ranks, for tests of how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwise.checkpoint import staging
from shardwise.checkpoint.store import CheckpointStore, SaveFailed
from shardwise.checkpoint.writing import StateWriter


def item(name: str) -> WriteItem:
    return WriteItem(MetadataIndex(name), WriteItemType.TENSOR)


def state(value: float) -> dict[str, torch.Tensor]:
    """One tensor in rows over the ranks, three that all have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(60.0).reshape(12, 5) + value
    made = {"rows": distribute_tensor(rows, mesh, [Shard(0)])}
    return made | {f"whole.{n}": torch.full((7,), value + n) for n in range(3)}


def divided(folder: Path) -> int:
    """Saves; the bytes that this rank copied aside."""
    writer = StateWriter(dist.group.WORLD, durable=True, background=True)
    pending = writer.begin(state(2.0))
    assert pending.staged
    pending.write(folder)
    return sum(writer._staging._sizes)


def read_divided(folder: Path) -> bool:
    """By PyTorch's own reader, on another number of ranks."""
    found, expected = state(0.0), state(2.0)
    dcp.load(dict(found), checkpoint_id=folder)

    def local(value: torch.Tensor) -> Any:
        return value.to_local() if isinstance(value, DTensor) else value

    return all(local(found[name]).equal(local(expected[name])) for name in found)


def fails_on_one(folder: Path) -> str:
    """What each rank says when the last one's disk is full."""
    store = CheckpointStore(folder, keep=2, background=True, group=dist.group.WORLD)

    def full(*args: Any) -> Any:
        raise OSError("full")

    if dist.get_rank() == dist.get_world_size() - 1:
        store._writer._files.write = full  # type: ignore[method-assign]
    store.save(1, state(1.0), {}, "{}", lambda _: None, None)
    try:
        store.wait()
    except SaveFailed as failure:
        assert failure.rank == dist.get_world_size() - 1
        left = list(folder.glob("*step*")) if dist.get_rank() == 0 else []  # which removes it
        assert not left, "nothing is left in the way"
        return str(failure)
    return ""


def train_with_late_copies(run: dict[str, Any], settles: bool = True) -> Any:
    """A run on a GPU whose copies aside begin long after the next step; `settles`: whether updates wait for them."""
    from support import scenarios

    fill, late = staging._fill, 40_000_000  # clock cycles, some 20 ms, for each tensor

    def slow(host: torch.Tensor, parts: Any, stream: Any = None) -> None:
        assert stream is not None
        torch.cuda._sleep(late)
        fill(host, parts, stream)

    staging._fill = slow
    if not settles:
        staging.Staging.settle = lambda self: None  # type: ignore[method-assign]
    return scenarios.train(run)
