"""DeepSpeed's Python API on shardwise: `import shardwise.deepspeed as deepspeed` runs existing training scripts.

The names, signatures and module paths are DeepSpeed's (version 0.19.8); they are backed by the engine of
`shardwise.initialize`. Missing parts raise an error that names them (see `refused.py`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.19.8"  # of the API, which scripts ask for
__all__ = [
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "add_config_arguments",
    "checkpointing",
    "comm",
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

_MODULES = ("accelerator", "checkpointing", "comm", "ops", "runtime", "utils", "zero")
_HOMES = {
    "DeepSpeedDataLoader": "data",
    "DeepSpeedEngine": "engine",
    "add_config_arguments": "setup",
    "get_accelerator": "accelerator",
    "init_distributed": "comm",
    "initialize": "setup",
    "log_dist": "utils",
    "logger": "utils",
}


def __getattr__(name: str) -> Any:
    """Imports the heavy parts on first use, so that the launcher starts fast."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name == "dist":
        return import_module(f"{__name__}.comm")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    from shardwise.deepspeed.refused import missing

    return missing(__name__, name)
