"""Every test of the data has a cache of its own, so that nothing comes from an earlier run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of this test."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (or bytes, or text) under a name and gives the path."""

    def write(name: str, content: Any) -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return write
