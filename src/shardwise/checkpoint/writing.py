"""Writes a run's tensors, each rank its part, as PyTorch's distributed checkpoint does, but in two halves.

`StateWriter.begin` is what training has to wait for: that all ranks mean the same, and copying aside (staging.py).
`Pending.write` is the rest, for another thread. Who writes what is planned by PyTorch's own planner, once: while names,
shapes and types stay the same, so do the plan and the index. Replicas are divided over the ranks that have them, and a
rank copies aside what it writes alone.

What was offloaded is not copied aside, since that would take the memory it was offloaded from; nor is anything where
the host has too little memory, or where the run wants to wait anyway. It is then written in the training thread, a
tensor at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.files import TensorFiles
from shardwise.checkpoint.host_copies import host_name
from shardwise.checkpoint.staging import Staging, StagingSource
from shardwise.core.compat.torch_private import DistWrapper, flatten_state_dict, local_tensor
from shardwise.core.host_memory import host_memory
from shardwise.distributed.lazy_rows import LazyShardedTensor, split_rows

Digests = dict[str, tuple[int, str]]  # by a file's name: its size and hash


@dataclass
class _WritePlan:
    """What this rank writes; on the first rank also the index."""

    outline: list[tuple[Any, ...]]
    items: list[WriteItem]
    stages: bool  # whether it is to be copied aside, and there is the memory for it
    index: Metadata | None


@dataclass
class Pending:
    """A save whose tensors are copied aside, or on their way; or that must be written before training goes on."""

    staged: bool
    write: Callable[[Path], list[Digests]]  # into a folder; returns every rank's files


class StateWriter:
    """Writes states one after the other. All ranks call all methods, unless said otherwise."""

    def __init__(self, group: dist.ProcessGroup, durable: bool, background: bool) -> None:
        """`durable`: on return the bytes are on the disk. `background`: not all has to be done at once."""
        self._durable, self._background = durable, background
        self._ranks, self._group = DistWrapper(group, True, 0), group
        self._plan: _WritePlan | None = None
        self._files, self._staging = TensorFiles(), Staging()
        self._notes: list[str] = []

    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Any]) -> Pending:
        """Copies aside what this rank is to write, or has it written at once: see Pending."""
        whole, rows = split_rows(tensors)
        outline = [_outline(name, value) for name, value in whole.items()]
        known = torch.tensor(self._plan is not None and self._plan.outline == outline)
        dist.all_reduce(known, op=dist.ReduceOp.MIN, group=self._group)
        if self._plan is None or not known:
            self._plan = self._make_plan(whole, outline, all(one.device is not None for one in rows.values()))
        plan = self._plan
        flat = (
            flatten_state_dict(whole)[0] if any(isinstance(v, dict | list | tuple) for v in whole.values()) else whole
        )
        if not plan.stages:
            found = ((item, _data(item, flat, rows)) for item in plan.items)
            return Pending(False, lambda folder: self._write(plan, folder, found))
        places = [*(one.device for one in rows.values()), *(v.device for v in flat.values() if hasattr(v, "device"))]
        device = next((place for place in places if place is not None and place.type == "cuda"), torch.device("cpu"))
        sources = [_source(item, flat, rows) for item in plan.items]
        objects = {number: one for number, one in enumerate(sources) if isinstance(one, io.BytesIO)}
        copies = self._staging.stage([one for one in sources if isinstance(one, StagingSource)], device)

        def staged() -> Iterator[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
            left = iter(copies.wait())
            for number, item in enumerate(plan.items):
                yield item, objects[number] if number in objects else next(left)

        return Pending(True, lambda folder: self._write(plan, folder, staged()))

    def settle(self) -> None:
        """Before anything changes the state that was saved last: see staging.py. Asks nobody."""
        self._staging.settle()

    def notes(self) -> list[str]:
        """What is to be told, once; this rank's."""
        notes, self._notes = self._notes, []
        return notes

    def _make_plan(self, whole: dict[str, Any], outline: list[tuple[Any, ...]], resident: bool) -> _WritePlan:
        planner = DefaultSavePlanner()
        index: Metadata | None = None

        def mine() -> SavePlan:
            planner.set_up_planner(whole, None, self._ranks.is_coordinator)
            return planner.create_local_plan()

        def divide(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal index
            divided, index = planner.create_global_plan(plans)
            return divided

        items = planner.finish_plan(self._ranks.reduce_scatter("plan", mine, divide)).items
        return _WritePlan(outline, items, self._background and resident and self._has_room(items), index)

    def _has_room(self, items: list[WriteItem]) -> bool:
        """Whether copies of all that is to be written take no more than half of what each host has left."""
        size = sum(one.chunk.sizes.numel() * one.properties.dtype.itemsize for i in items if (one := i.tensor_data))
        left, _ = host_memory()
        asked = self._ranks.all_gather_object((host_name(), size, left))
        for host in dict.fromkeys(name for name, _, _ in asked):
            needed = sum(size for name, size, _ in asked if name == host)
            room = min(left for name, _, left in asked if name == host) // 2
            if needed > room:
                self._notes.append(
                    f"training waits while checkpoints are written: to copy them aside {host} would need "
                    f"{needed / 2**30:.1f} GiB, and half of its free memory is {room / 2**30:.1f} GiB"
                )
                return False
        return True

    def _write(self, plan: _WritePlan, folder: Path, data: Any) -> list[Digests]:
        """This rank's file, and on the first rank the index; fails on all ranks if it does on one."""
        name = f"__{self._ranks.rank}_0.distcp"

        def mine() -> tuple[list[WriteResult], Digests]:
            if not plan.items:
                return [], {}
            folder.mkdir(parents=True, exist_ok=True)
            places, digest = self._files.write(folder / name, data, self._durable)
            return places, {name: digest}

        def seal(written: list[tuple[list[WriteResult], Digests]]) -> list[Digests]:
            assert plan.index is not None
            folder.mkdir(parents=True, exist_ok=True)
            FileSystemWriter(folder, sync_files=self._durable).finish(plan.index, [places for places, _ in written])
            return [digests for _, digests in written]

        written: list[Digests] = self._ranks.all_reduce("write", mine, seal)
        return written


def _outline(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return name, type(value)
    local = _local(value)
    assert local is not None
    placed = value.placements if isinstance(value, DTensor) else None
    return name, value.shape, value.dtype, local.shape, placed


def _local(value: Any) -> torch.Tensor | None:
    return local_tensor(value) if isinstance(value, DTensor) else value if isinstance(value, torch.Tensor) else None


def _data(item: WriteItem, whole: dict[str, Any], rows: Mapping[str, LazyShardedTensor]) -> torch.Tensor | io.BytesIO:
    """What an item of the plan stands for."""
    if (found := rows.get(item.index.fqn)) is not None:
        return found.read()
    value = find_state_dict_object(whole, item.index)
    if isinstance(value, torch.Tensor):
        return value.detach()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def _source(
    item: WriteItem, tensors: dict[str, Any], rows: Mapping[str, LazyShardedTensor]
) -> StagingSource | io.BytesIO:
    name = item.index.fqn
    if (found := rows.get(name)) is not None:
        assert item.tensor_data is not None
        return StagingSource(item.tensor_data.chunk.sizes, found.outline.dtype, found.parts())
    value = _data(item, tensors, rows)
    if isinstance(value, io.BytesIO):
        return value
    steady = isinstance(tensors[name], nn.Parameter) or name.startswith("optimizer.")
    return StagingSource(value.shape, value.dtype, [value], steady)
