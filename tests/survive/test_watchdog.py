"""The watchdog leaves with its rank, and tells a slow disk from a rank that is not there."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.train.status import Status
from shardwise.train.watchdog import scene, watchdog
from shardwise.train.watchdog.verdict import judge


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
    monkeypatch.setattr(watchdog, "longest_wait", lambda patient: (0.0, 60.0) if "7" in patient else (60.0, 0.0))
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


def entry(kind: str, number: int, seconds: float, pending: bool = True, p2p: bool = True) -> dict[str, Any]:
    """What NCCL's flight recorder notes; a send in a batch never gets another state."""
    return {
        "process_group": ["7", "pipeline"],
        "collective_seq_id": 3 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "is_p2p": p2p,
        "profiling_name": f"nccl:{kind}",
        "state": "scheduled" if pending else "completed",
        "retired": not pending,
        "time_created_ns": time.time_ns() - int(seconds * 1e9),
        "input_sizes": [[4, 8]],
        "input_dtypes": ["BFloat16"],
    }


def test_sends_in_a_batch_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own records look pending for ever, and the record of a batch that is done is not among the active ones."""
    done = [entry("send 0->1", 1, 90), entry("recv 0<-1", 1, 90), entry("coalesced", 1, 90, pending=False)]
    under_way = [entry("recv 0<-1", 2, 5), entry("coalesced", 2, 5)]
    monkeypatch.setattr(scene, "flight_recording", lambda active: done[:2] + under_way if active else done + under_way)
    waited, patiently = scene.longest_wait(set())
    assert 5 <= waited < 80 and patiently == 0
    assert scene.longest_wait({"7"}) == (0.0, pytest.approx(waited, abs=5))


def test_a_send_waits_for_its_peer() -> None:
    """Ranks 4 and 6 of a pipeline; which of them is behind shows in what the other waits for."""
    entries = [
        entry("recv 0<-1", 2, 70),
        entry("coalesced", 2, 70),
        entry("all_reduce", 9, 300, pending=False, p2p=False),
    ]
    (pending,), begun = scene.read_recording(entries, {"7": (4, 6)})
    assert (pending.kind, pending.peers, pending.number) == ("recv 0<-1", (6,), 2) and begun == {"7": 9}
    values = {"host": "h", "process": 1, "step": 5, "doing": "computing", "module": "", "line": ""}
    members = {"7": (4, 6)}
    four = scene.Scene(4, waiting=(pending,), begun=begun, members=members, **values)
    six = scene.Scene(6, begun={"7": 9}, members=members, **values)
    assert judge({4: four, 6: six}, {}, 60.0).late == (6,)
    back = scene.PendingCollective("7", 2, "send 1->0", "", 70.0, (4,))
    assert judge({4: four, 6: replace(six, waiting=(back,))}, {}, 60.0).late == ()
