"""Access to sharded parameters for optimizers: local parts, the groups that share the rest, and states sharded alike.

A parameter may be sharded along several axes of its mesh: by tensor or expert parallelism first, on its first or second
dim, and what that leaves by ZeRO. Seen as [rows, cols], rows being its first dim, a rank then has a range of rows and a
range of columns. Plain tensors are unsharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardwise.core.compat.torch_private import DTensorSpec, TensorMeta, local_tensor


@dataclass(frozen=True)
class Cut:
    """A dim of a parameter sharded over a group, and this rank's place in it."""

    dim: int
    group: dist.ProcessGroup
    rank: int
    size: int

    def span(self, length: int, rank: int | None = None) -> tuple[int, int]:
        """Returns the range of a rank (default: this one): equal parts rounded up, as torch.chunk."""
        each = -(-length // self.size)
        rank = self.rank if rank is None else rank
        return min(rank * each, length), min((rank + 1) * each, length)


def cuts_of(parameter: Tensor) -> tuple[Cut, ...]:
    """Returns how a parameter is sharded, in the order that its parts come about: ZeRO's cut is the last."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    cuts = []
    for axis in reversed(range(mesh.ndim)):  # the innermost axis is that of tensor or expert parallelism
        placement = parameter.placements[axis]
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        assert dim < 2, parameter.placements
        cuts.append(Cut(dim, mesh.get_group(axis), mesh.get_local_rank(axis), mesh.size(axis)))
    return tuple(cuts)


def column_cut(parameter: Tensor) -> Cut | None:
    """Returns the cut between columns, if there is one: a row then spans several ranks."""
    return next((cut for cut in cuts_of(parameter) if cut.dim == 1), None)


def local_range(parameter: Tensor, dim: int, length: int | None = None) -> tuple[int, int]:
    """Returns this rank's range of a dim, or of another `length` that is cut in the same way."""
    start = 0
    stop = parameter.shape[dim] if length is None else length
    for cut in cuts_of(parameter):
        if cut.dim == dim:
            low, high = cut.span(stop - start)
            start, stop = start + low, start + high
    return start, stop


def divides(parameter: Tensor) -> bool:
    """Returns whether all ranks have parts of one size."""
    sizes = list(parameter.shape)
    for cut in cuts_of(parameter):
        if sizes[cut.dim] % cut.size:
            return False
        sizes[cut.dim] //= cut.size
    return True


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's part, as a plain tensor that shares the memory."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def local_grad(parameter: Tensor) -> Tensor:
    """Returns this rank's part of the gradient."""
    assert parameter.grad is not None
    return local_of(parameter.grad)


def first_row(parameter: Tensor) -> int:
    """Returns the index of this rank's first row in the full parameter."""
    return local_range(parameter, 0)[0] if parameter.ndim else 0


def first_column(parameter: Tensor) -> int:
    """Returns the index of this rank's first column in the full parameter, seen as [rows, cols]."""
    if parameter.ndim < 2:
        return 0
    return local_range(parameter, 1)[0] * parameter.shape[2:].numel()


def zeros_beside(
    parameter: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32, dims: Sequence[int] | None = None
) -> Tensor:
    """Returns zeros of a shape, sharded as the parameter is, so that checkpoints can reshard them.

    `dims`: the parameter's dim that each of theirs is cut like, -1 for one that is full; by default the first ones.
    """
    local = local_of(parameter)
    if not isinstance(parameter, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=local.device)
    followed = range(len(shape)) if dims is None else dims
    sizes = []
    for dim, length in zip(followed, shape, strict=True):
        low, high = (0, length) if dim < 0 else local_range(parameter, dim, length)
        sizes.append(high - low)
    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), dtype)
    spec = DTensorSpec(parameter.device_mesh, placements_along(parameter, followed), tensor_meta=meta)
    return DTensor(torch.zeros(sizes, dtype=dtype, device=local.device), spec, requires_grad=False)


def placements_along(parameter: DTensor, dims: Sequence[int]) -> tuple[Placement, ...]:
    """Returns a parameter's placements for a tensor that is cut like these of its dims and full otherwise."""
    kept = []
    for placement in parameter.placements:
        follows = placement.is_replicate() or placement.dim in dims  # type: ignore[attr-defined]
        kept.append(placement if follows else Replicate())
    return tuple(kept)


def summed(parts: Sequence[Tensor], cuts: Sequence[Sequence[Cut]]) -> list[Tensor]:
    """Returns each tensor summed over the ranks of its cuts; those of the same groups are reduced together."""
    sums = list(parts)
    alike: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, given in enumerate(cuts):
        alike.setdefault(tuple(cut.group for cut in given), []).append(index)
    for groups, indices in alike.items():
        if not groups:
            continue
        flat = torch.cat([parts[i].reshape(-1) for i in indices])
        for group in groups:
            dist.all_reduce(flat, group=group)
        for i, total in zip(indices, flat.split([parts[i].numel() for i in indices]), strict=True):
            sums[i] = total.view(parts[i].shape)
    return sums


def new_step() -> Tensor:
    """Returns a step count: a tensor, since checkpoints restore in place; on the host, so that reading it is free."""
    return torch.zeros((), dtype=torch.float32)
