"""The watchdog leaves with its rank, and tells a slow disk from a rank that is not there."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.train.status import Status
from shardwise.train.watchdog import watchdog
from shardwise.train.watchdog.scene import PendingCollective


class SlowStore:
    """A meeting point that takes its time to answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def check(self, keys: list[str]) -> bool:
        assert keys
        self.asked.set()
        time.sleep(0.5)
        return False


def test_a_look_under_way_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python ends the thread inside torch at the very end, and a run that is done leaves with an abort."""
    monkeypatch.setattr(watchdog, "EVERY", 0.01)
    world: Any = SimpleNamespace(rank=0, size=1, checkpoint=SimpleNamespace(group_name="0"), copies=None)
    with watchdog.Watchdog(world, Status(None), 60.0, tmp_path, print, "0") as dog:
        store = dog._store = SlowStore()
        dog._thread.start()
        assert store.asked.wait(60)
    assert not dog._thread.is_alive()


class Store:
    """A meeting point in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def append(self, key: str, value: str) -> None:
        self.values[key] = self.values.get(key, "") + value


@pytest.mark.parametrize(
    ("others", "forsaken"),
    [("saving", False), ("computing", False), ("computing for long", True), ("stopped", True)],
)
def test_a_wait_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str, forsaken: bool) -> None:
    """Rank 0 has waited for longer than the timeout in the group that saves; rank 1 is slow, elsewhere, or frozen."""
    # Who answers does so every 0.02 s; only of one that never will is the end waited for.
    monkeypatch.setattr(watchdog, "ANSWER", 0.3 if others == "stopped" else 30.0)
    monkeypatch.setattr(watchdog, "under_way", lambda: (PendingCollective("7", 3, "barrier", "", 60.0),))
    store, dogs = Store(), []
    for rank, doing in enumerate(["saving", others.removesuffix(" for long")]):
        world: Any = SimpleNamespace(
            rank=rank, size=2, checkpoint=SimpleNamespace(group_name="7"), copies=None, is_main=rank == 0
        )
        status = Status(None)
        status.set(doing, 5)
        dogs.append(watchdog.Watchdog(world, status, 20.0, tmp_path, print, "0"))
        dogs[-1]._store = store
    first, second = dogs
    over = threading.Event()

    def answer() -> None:
        while not over.wait(0.02):
            second._answer()

    thread = threading.Thread(target=answer)
    second._answer()
    if others.endswith("for long"):
        second._since -= 30.0
    if others != "stopped":
        thread.start()
    try:
        assert not first._overdue()
        assert first._forsaken() is forsaken
        assert not forsaken or others == "computing for long" or first._forsaken() is False, "not asked again at once"
    finally:
        over.set()
        if others != "stopped":
            thread.join()
