"""Shardwise: trains and fine-tunes any Hugging Face model, from one laptop or GPU to a cluster."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["Trainer", "__version__", "initialize", "load_run"]

_HOMES = {"Trainer": "shardwise.launch.trainer", "initialize": "shardwise.train.engine", "load_run": "shardwise.config"}


def __getattr__(name: str) -> Any:
    """Imports the heavy parts on first use, so that `import shardwise` and `shardwise --help` are quick."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
