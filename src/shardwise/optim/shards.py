"""Access to sharded parameters for optimizers: local rows, shard group, and states sharded the same way.

Parameters are sharded on their first dim over one axis of the mesh and replicated over the others; plain tensors are
unsharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardwise.core.compat.torch_private import local_tensor


@dataclass(frozen=True)
class Division:
    """The group over which a parameter's rows are sharded, and this rank's place in it; group None = unsharded."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def rows(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """Returns the range of rows of a rank (default: this one): equal parts rounded up, as torch.chunk."""
        per_rank = -(-total // self.size)
        rank = self.rank if rank is None else rank
        return min(rank * per_rank, total), min((rank + 1) * per_rank, total)


UNSHARDED = Division(None, 0, 1)


def division_of(parameter: Tensor) -> Division:
    """Returns how a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return UNSHARDED
    mesh = parameter.device_mesh
    axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    assert all(parameter.placements[axis] == Shard(0) for axis in axes) and len(axes) <= 1, parameter.placements
    if not axes or mesh.size(axes[0]) == 1:
        return UNSHARDED
    return Division(mesh.get_group(axes[0]), mesh.get_local_rank(axes[0]), mesh.size(axes[0]))


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's rows, as a plain tensor that shares the memory."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def local_grad(parameter: Tensor) -> Tensor:
    """Returns this rank's rows of the gradient."""
    assert parameter.grad is not None
    return local_of(parameter.grad)


def first_row(parameter: Tensor) -> int:
    """Returns the index of this rank's first row in the full parameter."""
    return division_of(parameter).rows(parameter.shape[0])[0] if parameter.ndim else 0


def zeros_beside(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns zeros of a shape with the parameter's rows, sharded as it is, so that checkpoints can reshard them."""
    local = local_of(parameter)
    if not isinstance(parameter, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=local.device)
    assert shape[0] == parameter.shape[0]
    local_zeros = torch.zeros((local.shape[0], *shape[1:]), dtype=dtype, device=local.device)
    size = torch.Size(shape)
    stride = torch.empty(size, dtype=dtype, device="meta").stride()
    options: dict[str, Any] = {"run_check": False, "shape": size, "stride": stride}
    return DTensor.from_local(local_zeros, parameter.device_mesh, parameter.placements, **options)


def new_step() -> Tensor:
    """Returns a step count: a tensor, since checkpoints restore in place; on the host, so that reading it is free."""
    return torch.zeros((), dtype=torch.float32)
