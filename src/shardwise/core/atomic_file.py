"""One page as a file: whoever opens it sees the old one or the new one whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shardwise.core.errors import UserError


def check_page(path: Path, example: str) -> None:
    """Refuses a folder in the place of a file, before the page is made."""
    if path.is_dir():
        raise UserError("--html", str(path), "is a folder", f"name a file, e.g. {example}")


def write_page(page: str, path: Path) -> None:
    """Puts it in the place of what was there."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError("--html", str(path), f"cannot be written ({error.strerror})", "choose another") from None
