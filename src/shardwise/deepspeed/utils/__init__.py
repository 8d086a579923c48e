"""Module path `deepspeed.utils`."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.deepspeed.data import RepeatingLoader
from shardwise.deepspeed.fragments import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from shardwise.deepspeed.refused import missing

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_modules",
]


def _logger() -> logging.Logger:
    """A logger that prints INFO lines without configuration, as scripts expect."""
    logger_ = logging.getLogger("shardwise.deepspeed")
    if not logger_.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        logger_.addHandler(handler)
        logger_.setLevel(logging.INFO)
        logger_.propagate = False
    return logger_


logger = _logger()


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the given ranks ([-1] or None: on all)."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if ranks is None or rank in ranks or -1 in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[type | str]) -> list[nn.Module]:
    """Returns the modules of those classes; sets nothing, as full blocks are gathered in any case."""
    names = {kind if isinstance(kind, str) else kind.__name__ for kind in leaf_module_classes}
    return [module for module in model.modules() if type(module).__name__ in names]


def __getattr__(name: str) -> Any:
    return missing(__name__, name)
