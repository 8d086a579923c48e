"""Tensors that are in no memory as a whole, saved and loaded by PyTorch's distributed checkpoint as if they were.

What is offloaded lies in pieces, on the host or on disk, or is made of two halves. A `Rows` shows the checkpoint an
outline (shape, type, how it is sharded; no memory), hands out this rank's part when it is written, and takes in rows as
they are read. Loading then holds one tensor besides, and saving those of one file: PyTorch's writer keeps all that it
wrote until it closes the file, so offloaded states are written in files of bounded size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.futures import Future

from shardwise.errors import UserError

FILE = 128 << 20  # bytes after which a file is closed


@dataclass(frozen=True)
class Rows:
    """A sharded tensor by its rows: `read` gives this rank's part, `write` takes rows of it from the given one on."""

    outline: torch.Tensor
    read: Callable[[], torch.Tensor]
    write: Callable[[int, torch.Tensor], None]


def outline(like: torch.Tensor, shape: tuple[int, ...], local: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape, sharded like another one, that takes no memory."""
    empty = torch.empty((), dtype=dtype).expand(local)
    if not isinstance(like, DTensor):
        return empty
    whole = torch.empty((), device="meta", dtype=dtype).expand(shape)
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(whole.shape, stride, dtype))
    # Not from_local: it would move the outline to the mesh's device.
    return DTensor(empty, spec, requires_grad=False)


def split_rows(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Rows]]:
    """What the planners need: every tensor, outlines in the place of Rows, and the Rows."""
    rows = {name: value for name, value in tensors.items() if isinstance(value, Rows)}
    return {n: v.outline if isinstance(v, Rows) else v for n, v in tensors.items()}, rows


class SaveRows(DefaultSavePlanner):
    """Reads each of the Rows when its turn to be written has come."""

    def __init__(self, rows: Mapping[str, Rows]) -> None:
        super().__init__()
        self._rows = rows

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The data behind an item of the plan."""
        found = self._rows.get(index.fqn)
        return super().lookup_object(index) if found is None else found.read()


class BoundedWriter(FileSystemWriter):
    """Writes a rank's tensors into several files, none much larger than FILE, one after the other."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes what the plan names."""
        results: list[WriteResult] = []
        for number, items in enumerate(_files(plan.items)):
            place = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=place), planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _files(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    group: list[WriteItem] = []
    size = 0
    for item in items:
        group.append(item)
        if (data := item.tensor_data) is not None:
            size += data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if size >= FILE:
            yield group
            group, size = [], 0
    if group:
        yield group


class LoadRows(DefaultLoadPlanner):
    """Hands rows on as soon as they are read."""

    def __init__(self, rows: Mapping[str, Rows]) -> None:
        super().__init__()
        self._rows = rows

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Our checkpoints hold tensors alone; PyTorch would read an object as a pickle that may run anything."""
        name = read_item.dest_index.fqn
        raise UserError("checkpoint", name, "is no tensor", "use a checkpoint of Shardwise")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where an item is to be read into."""
        found = self._rows.get(read_item.dest_index.fqn)
        if found is None:
            return super().resolve_tensor(read_item)  # type: ignore[no-any-return]
        return torch.empty(tuple(read_item.lengths), dtype=found.outline.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Takes in an item that was read."""
        if (found := self._rows.get(read_item.dest_index.fqn)) is not None:
            found.write(read_item.dest_offsets[0] if len(read_item.dest_offsets) else 0, tensor)
