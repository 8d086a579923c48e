"""Tensors that are never materialised in full, saved and loaded by PyTorch's distributed checkpoint.

Offloaded tensors are stored in pieces, on the host or on disk, or in two halves. A `LazyShardedTensor` presents an
outline to the checkpoint (shape, dtype, sharding; no memory), returns this rank's part when it is written, and receives
rows as they are read. Loading and saving then need memory for one more tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor, Placement

from shardwise.core.compat.torch_private import DTensorSpec, TensorMeta
from shardwise.core.errors import UserError


@dataclass(frozen=True)
class LazyShardedTensor:
    """A sharded tensor by its rows: `parts` returns this rank's, in order; `write` stores a range of them.

    Where a range begins is given for the first dims; along the others it is complete.
    """

    outline: torch.Tensor
    parts: Callable[[], Iterable[torch.Tensor]]
    write: Callable[[Sequence[int], torch.Tensor], None]
    device: torch.device | None = None  # where all parts lie, if that is the device that trains: nothing was offloaded

    def read(self) -> torch.Tensor:
        """This rank's part, on the host."""
        parts = [part.cpu() for part in self.parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def window(offset: Sequence[int], part: torch.Tensor) -> tuple[slice, ...]:
    """The range of a tensor that begins at an offset and has the size of a part."""
    return tuple(slice(o, o + size) for o, size in zip(offset, part.shape, strict=False))


def outline(
    like: torch.Tensor,
    shape: tuple[int, ...],
    local: tuple[int, ...],
    dtype: torch.dtype,
    placements: tuple[Placement, ...] | None = None,
) -> torch.Tensor:
    """A tensor of this shape, sharded like another one or by `placements`, that takes no memory."""
    empty = torch.empty((), dtype=dtype).expand(local)
    if not isinstance(like, DTensor):
        return empty
    full = torch.empty((), device="meta", dtype=dtype).expand(shape)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(full.shape, stride, dtype)
    spec = DTensorSpec(like.device_mesh, placements or like.placements, tensor_meta=meta)
    # Not from_local: it would move the outline to the mesh's device.
    return DTensor(empty, spec, requires_grad=False)


def split_rows(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, LazyShardedTensor]]:
    """Splits a state dict for the planners: all tensors, lazy ones replaced by their outlines, and the lazy ones."""
    rows = {name: value for name, value in tensors.items() if isinstance(value, LazyShardedTensor)}
    return {n: v.outline if isinstance(v, LazyShardedTensor) else v for n, v in tensors.items()}, rows


class LoadRows(DefaultLoadPlanner):
    """Load planner that passes rows on as soon as they are read."""

    def __init__(self, rows: Mapping[str, LazyShardedTensor]) -> None:
        super().__init__()
        self._rows = rows

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Rejects objects: our checkpoints hold only tensors, and PyTorch would unpickle an object."""
        name = read_item.dest_index.fqn
        raise UserError("checkpoint", name, "is no tensor", "use a checkpoint of Shardwise")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns the tensor to read an item into."""
        rows = self._rows.get(read_item.dest_index.fqn)
        if rows is None:
            return super().resolve_tensor(read_item)  # type: ignore[no-any-return]
        return torch.empty(tuple(read_item.lengths), dtype=rows.outline.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Stores an item that was read."""
        if (rows := self._rows.get(read_item.dest_index.fqn)) is not None:
            rows.write(read_item.dest_offsets, tensor)
