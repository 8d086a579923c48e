"""Sharding rules for operators that DTensor has none for and that occur in backward.

There no module can fall back to plain tensors, so these operators run on replicated tensors.
"""

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

REPLICATED = {  # number of tensors that each operator returns
    "log_sigmoid_forward": 2,
    "log_sigmoid_backward": 1,
    "avg_pool2d": 1,
    "avg_pool2d_backward": 1,
}


@cache
def add_rules() -> None:
    """Registers the rules with DTensor, once per process."""
    for name, outputs in REPLICATED.items():
        _add(getattr(torch.ops.aten, name).default, outputs)
    # The rule of torch 2.11 fails where a dim has no index: the backward of x[:, positions].
    if TORCH < (2, 12):
        set_dtensor_handler(torch.ops.aten.index_put.default, _index_put)


def _add(operator: Any, outputs: int) -> None:
    def rule(*args: Any, **kwargs: Any) -> Any:
        inputs: list[Any] = []
        for x in (*args, *kwargs.values()):
            inputs.append(Replicate() if isinstance(x, DTensorSpec) else None)
        return [([Replicate()] * outputs, inputs)]

    register_sharding(operator)(rule)


def _index_put(operator: Any, args: Any, kwargs: Any) -> DTensor:
    """Runs index_put on full tensors, with the same result on every rank."""
    mesh = next(x.device_mesh for x in tree_iter((args, kwargs)) if isinstance(x, DTensor))
    full = [Replicate()] * mesh.ndim

    def local(x: Any) -> Any:
        return local_tensor(x.redistribute(placements=full)) if isinstance(x, DTensor) else x

    result = operator(*tree_map(local, args), **tree_map(local, kwargs))
    return DTensor.from_local(result, mesh, full, run_check=False)
