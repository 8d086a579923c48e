"""Writes a run's tensors, each rank its shard, in PyTorch's distributed checkpoint format, but in two halves.

`StateWriter.begin` is what training waits for: agreement of all ranks on the plan, and staging (staging.py).
`Pending.write` is the rest, for another thread. Who writes what is planned by PyTorch's own planner, once: while names,
shapes and dtypes stay the same, so do the plan and the index. Replicas are divided over the ranks that have them, and a
rank stages only what it writes.

Offloaded state is not staged, since that would take the memory it was offloaded from; nor is anything if the host has
too little memory, or if the run saves synchronously. It is then written in the training thread, a tensor at a time.
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
from shardwise.checkpoint.staging import Source, Staging
from shardwise.core.compat.torch_private import DistWrapper, flatten_state_dict, local_tensor
from shardwise.core.host_memory import host_memory
from shardwise.distributed.lazy_rows import Rows, split_rows

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
    """A save whose tensors are staged or being staged, or that must be written before training resumes."""

    staged: bool
    write: Callable[[Path], list[Digests]]  # into a folder; returns every rank's files


class StateWriter:
    """Writes states one after the other. All ranks call all methods, unless stated otherwise."""

    def __init__(self, group: dist.ProcessGroup, durable: bool, background: bool) -> None:
        """`durable`: bytes are fsynced on return. `background`: writing may happen in another thread."""
        self._durable = durable
        self._background = background
        self._ranks = _DistWrapper(group, True, 0)
        self._group = group
        self._plan: _WritePlan | None = None
        self._files = TensorFiles()
        self._staging = Staging()
        self._notes: list[str] = []

    @torch.no_grad()
    def begin(self, tensors: Mapping[str, Any]) -> Pending:
        """Stages what this rank writes, or prepares to write it synchronously: see Pending."""
        plain_tensors, rows = split_rows(tensors)
        outline = [_outline(name, value) for name, value in plain_tensors.items()]
        plan_valid = torch.tensor(self._plan is not None and self._plan.outline == outline)
        dist.all_reduce(plan_valid, op=dist.ReduceOp.MIN, group=self._group)
        if self._plan is None or not plan_valid:
            resident = all(row_source.device is not None for row_source in rows.values())
            self._plan = self._make_plan(plain_tensors, outline, resident)
        plan = self._plan
        nested = any(isinstance(value, dict | list | tuple) for value in plain_tensors.values())
        flat = flatten_state_dict(plain_tensors)[0] if nested else plain_tensors
        if not plan.stages:
            data = ((item, _data(item, flat, rows)) for item in plan.items)
            return Pending(False, lambda folder: self._write(plan, folder, data))
        devices = [
            *(row_source.device for row_source in rows.values()),
            *(v.device for v in flat.values() if hasattr(v, "device")),
        ]
        gpus = [device for device in devices if device is not None and device.type == "cuda"]
        device = gpus[0] if gpus else torch.device("cpu")
        sources = [_source(item, flat, rows) for item in plan.items]
        objects = {number: source for number, source in enumerate(sources) if isinstance(source, io.BytesIO)}
        copies = self._staging.stage([source for source in sources if isinstance(source, Source)], device)

        def staged() -> Iterator[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
            staged_tensors = iter(copies.wait())
            for number, item in enumerate(plan.items):
                yield item, objects[number] if number in objects else next(staged_tensors)

        return Pending(True, lambda folder: self._write(plan, folder, staged()))

    def settle(self) -> None:
        """Call before anything changes the state that was saved last: see staging.py. Not a collective."""
        self._staging.settle()

    def notes(self) -> list[str]:
        """Returns this rank's notes, each once."""
        notes = self._notes
        self._notes = []
        return notes

    def _make_plan(self, tensors: dict[str, Any], outline: list[tuple[Any, ...]], resident: bool) -> _WritePlan:
        planner = DefaultSavePlanner()
        index: Metadata | None = None

        def local_plan() -> SavePlan:
            planner.set_up_planner(tensors, None, self._ranks.is_coordinator)
            return planner.create_local_plan()

        def global_plan(plans: list[SavePlan]) -> list[SavePlan]:
            nonlocal index
            plans_by_rank, index = planner.create_global_plan(plans)
            return plans_by_rank

        items = planner.finish_plan(self._ranks.reduce_scatter("plan", local_plan, global_plan)).items
        return _WritePlan(outline, items, self._background and resident and self._has_room(items), index)

    def _has_room(self, items: list[WriteItem]) -> bool:
        """Whether staging takes no more than half of each host's free memory."""
        size = sum(data.chunk.sizes.numel() * data.properties.dtype.itemsize for i in items if (data := i.tensor_data))
        free, _ = host_memory()
        reports = self._ranks.all_gather_object((host_name(), size, free))
        for host in dict.fromkeys(name for name, _, _ in reports):
            needed = sum(size for name, size, _ in reports if name == host)
            budget = min(free for name, _, free in reports if name == host) // 2
            if needed > budget:
                self._notes.append(
                    f"training waits while checkpoints are written: to copy them aside {host} would need "
                    f"{needed / 2**30:.1f} GiB, and half of its free memory is {budget / 2**30:.1f} GiB"
                )
                return False
        return True

    def _write(self, plan: _WritePlan, folder: Path, data: Any) -> list[Digests]:
        """This rank's file, and on the first rank the index; fails on all ranks if it does on one."""
        name = f"__{self._ranks.rank}_0.distcp"

        def write_shard() -> tuple[list[WriteResult], Digests]:
            if not plan.items:
                return [], {}
            folder.mkdir(parents=True, exist_ok=True)
            places, digest = self._files.write(folder / name, data, self._durable)
            return places, {name: digest}

        def write_index(written: list[tuple[list[WriteResult], Digests]]) -> list[Digests]:
            assert plan.index is not None
            folder.mkdir(parents=True, exist_ok=True)
            FileSystemWriter(folder, sync_files=self._durable).finish(plan.index, [places for places, _ in written])
            return [digests for _, digests in written]

        return self._ranks.all_reduce("write", write_shard, write_index)


def _outline(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return name, type(value)
    local = _local(value)
    assert local is not None
    placed = value.placements if isinstance(value, DTensor) else None
    return name, value.shape, value.dtype, local.shape, placed


def _local(value: Any) -> torch.Tensor | None:
    if isinstance(value, DTensor):
        return value._local_tensor
    return value if isinstance(value, torch.Tensor) else None


def _data(item: WriteItem, tensors: dict[str, Any], rows: Mapping[str, Rows]) -> torch.Tensor | io.BytesIO:
    """The data of an item of the plan."""
    if (row_source := rows.get(item.index.fqn)) is not None:
        return row_source.read()
    value = find_state_dict_object(tensors, item.index)
    if isinstance(value, torch.Tensor):
        return value.detach()
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


def _source(item: WriteItem, tensors: dict[str, Any], rows: Mapping[str, Rows]) -> Source | io.BytesIO:
    name = item.index.fqn
    if (row_source := rows.get(name)) is not None:
        assert item.tensor_data is not None
        return Source(item.tensor_data.chunk.sizes, row_source.outline.dtype, row_source.parts())
    value = _data(item, tensors, rows)
    if isinstance(value, io.BytesIO):
        return value
    steady = isinstance(tensors[name], nn.Parameter) or name.startswith("optimizer.")
    return Source(value.shape, value.dtype, [value], steady)
