"""Operators that DTensor has no rule for and that may be met in backward, where no module can step back: whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import register_sharding

from shardwise.core.compat.torch_private import (
    TORCH,
    DTensorSpec,
    local_tensor,
    set_dtensor_handler,
    tree_iter,
    tree_map,
)

WHOLE = {  # by how many tensors they return
    "log_sigmoid_forward": 2, "log_sigmoid_backward": 1, "avg_pool2d": 1, "avg_pool2d_backward": 1,
}  # fmt: skip


@cache
def add_rules() -> None:
    """Teaches DTensor that these take and give whole tensors."""
    for name, outputs in WHOLE.items():
        _add(getattr(torch.ops.aten, name).default, outputs)
    if TORCH < (
        2,
        12,
    ):  # whose rule fails where not every dimension has an index: the backward of x[:, positions]
        set_dtensor_handler(torch.ops.aten.index_put.default, _index_put)


def _add(operator: Any, outputs: int) -> None:
    def rule(*args: Any, **kwargs: Any) -> Any:
        given = [
            Replicate() if isinstance(x, DTensorSpec) else None for x in (*args, *kwargs.values())
        ]
        return [([Replicate()] * outputs, given)]

    register_sharding(operator)(rule)


def _index_put(operator: Any, args: Any, kwargs: Any) -> DTensor:
    """On full tensors, the same on every rank."""
    mesh = next(x.device_mesh for x in tree_iter((args, kwargs)) if isinstance(x, DTensor))
    full = [Replicate()] * mesh.ndim

    def local(x: Any) -> Any:
        return local_tensor(x.redistribute(placements=full)) if isinstance(x, DTensor) else x

    result = operator(*tree_map(local, args), **tree_map(local, kwargs))
    return DTensor.from_local(result, mesh, full, run_check=False)
