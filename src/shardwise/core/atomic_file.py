"""Writes a page atomically: readers see the old one or the new one in full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shardwise.core.errors import UserError


def check_page(path: Path, example: str) -> None:
    """Rejects a folder in place of a file, before the page is built."""
    if path.is_dir():
        raise UserError("--html", str(path), "is a folder", f"name a file, e.g. {example}")


def write_page(page: str, path: Path) -> None:
    """Replaces the file atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError("--html", str(path), f"cannot be written ({error.strerror})", "choose another") from None
