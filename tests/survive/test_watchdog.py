"""The watchdog leaves with its rank."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.survive import watchdog
from shardwise.train.status import Status


class SlowStore:
    """A meeting point that takes its time to answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        time.sleep(0.5)
        return False


def test_a_look_under_way_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python ends the thread inside torch at the very end, and a run that is done leaves with an abort."""
    monkeypatch.setattr(watchdog, "EVERY", 0.01)
    world: Any = SimpleNamespace(rank=0, size=1, checkpoint=SimpleNamespace(group_name="0"))
    with watchdog.Watchdog(world, Status(None), 60.0, tmp_path, print, "0") as dog:
        store = dog._store = SlowStore()
        dog._thread.start()
        assert store.asked.wait(5)
    assert not dog._thread.is_alive()
