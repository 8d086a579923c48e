"""DeepSpeed's Python API over shardwise: `import shardwise.deepspeed as deepspeed` serves existing training scripts.

The names, signatures and module paths are DeepSpeed's (its version 0.19 was read); what is behind them is the engine of
`shardwise.initialize`. What is not here says so by name (see `refused.py`). docs: "DeepSpeed's API" in the README.
"""

from __future__ import annotations

from typing import Any

from shardwise.deepspeed import checkpointing, comm, ops, runtime, utils, zero
from shardwise.deepspeed.accelerator import get_accelerator
from shardwise.deepspeed.comm import init_distributed
from shardwise.deepspeed.data import DeepSpeedDataLoader
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.refused import missing
from shardwise.deepspeed.setup import add_config_arguments, initialize
from shardwise.deepspeed.utils import log_dist, logger

__version__ = "0.19.8"  # of the API, which scripts ask for
dist = comm

__all__ = [
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "dist",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    return missing(__name__, name)
