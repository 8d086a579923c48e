"""Tensors that are in no memory as a whole, saved and loaded by PyTorch's distributed checkpoint as if they were.

What is offloaded lies in pieces, on the host or on disk, or is made of two halves. A `Rows` shows the checkpoint an
outline (shape, type, how it is sharded; no memory), hands out this rank's part when it is written, and takes in rows as
they are read. So neither saving nor loading holds more than one tensor besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


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


class LoadRows(DefaultLoadPlanner):
    """Hands rows on as soon as they are read."""

    def __init__(self, rows: Mapping[str, Rows]) -> None:
        super().__init__()
        self._rows = rows

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
