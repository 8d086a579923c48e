"""FSDP2 before torch 2.13 takes every parameter for a float: it asks gradients of packed weights and casts them.

Nothing here is used where torch itself leaves integers alone.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


@cache
def leave_integers_alone() -> None:
    """Teaches FSDP2 that parameters of integers have no gradient and are gathered as they are."""
    plain: Any = FSDPParam.init_dtype_attrs
    if "is_floating_point" in inspect.getsource(plain):
        return

    def init_dtype_attrs(self: Any, policy: Any) -> None:
        plain(self, policy)
        if not self.orig_dtype.is_floating_point:
            self.param_dtype = None

    def parameter(data: torch.Tensor, requires_grad: bool | None = None) -> nn.Parameter:
        return nn.Parameter(data, data.is_floating_point() if requires_grad is None else requires_grad)

    module: Any = _fsdp_param
    module.FSDPParam.init_dtype_attrs = init_dtype_attrs
    module.nn = SimpleNamespace(**vars(nn) | {"Parameter": parameter})
