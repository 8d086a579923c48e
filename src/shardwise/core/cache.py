"""Cache of converted models, prepared data and probe results between runs.

An entry is a folder that appears by one rename, so a crash half-way leaves nothing that looks finished.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cache_root() -> Path:
    """The cache folder: $SHARDWISE_CACHE, or ~/.cache/shardwise."""
    return Path(os.environ.get("SHARDWISE_CACHE", "~/.cache/shardwise")).expanduser()


def config_root() -> Path:
    """The folder of user settings: $SHARDWISE_CONFIG, or ~/.config/shardwise."""
    return Path(os.environ.get("SHARDWISE_CONFIG", "~/.config/shardwise")).expanduser()


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns `folder`, calling make(temporary folder) first if it does not exist; safe across processes."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder) + ".lock"):
        if not folder.is_dir():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                make(partial)
                partial.rename(folder)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return folder
