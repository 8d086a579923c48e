"""Operators that DTensor has no rule for and that may be met in backward, where no module can step back: whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding

from shardwise.core.compat.torch_private import DTensorSpec

WHOLE = {  # by how many tensors they return
    "log_sigmoid_forward": 2, "log_sigmoid_backward": 1, "avg_pool2d": 1, "avg_pool2d_backward": 1,
}  # fmt: skip


@cache
def add_rules() -> None:
    """Teaches DTensor that these take and give whole tensors."""
    for name, outputs in WHOLE.items():
        _add(getattr(torch.ops.aten, name).default, outputs)


def _add(operator: Any, outputs: int) -> None:
    def rule(*args: Any, **kwargs: Any) -> Any:
        given = [Replicate() if isinstance(x, DTensorSpec) else None for x in (*args, *kwargs.values())]
        return [([Replicate()] * outputs, given)]

    register_sharding(operator)(rule)
