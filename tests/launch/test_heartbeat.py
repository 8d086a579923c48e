"""Ranks that hang are told from ranks that work, that meet the others, or that were stopped with the launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.launch import heartbeat
from shardwise.launch.heartbeat import Heartbeats
from shardwise.train.status import Status


class Clock:
    """Time as the launcher sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(heartbeat.time, "sleep", lambda _: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def watch(clock: Clock, hearts: Heartbeats, seconds: int, beating: list[Status]) -> str:
    for _ in range(seconds):
        clock.now += 1.0
        for status in beating:
            status.beat()
        if verdict := hearts.verdict():
            return verdict
    return ""


def a_rank(logs: Path, rank: int, doing: str) -> Status:
    status = Status(logs / f"rank-{rank}.status")
    status.set(doing, 5)
    return status


def test_a_rank_that_hangs_is_named(tmp_path: Path, clock: Clock) -> None:
    alive, _ = a_rank(tmp_path, 0, "computing"), a_rank(tmp_path, 1, "computing")
    hearts = Heartbeats(tmp_path, {0: os.getpid(), 1: os.getpid()}, 60.0)
    assert not watch(clock, hearts, 60, [alive])
    verdict = watch(clock, hearts, 30, [alive])
    assert verdict.startswith("rank 1 has not responded for 60 s (timeout)")
    assert f"rank 1 (process {os.getpid()} on" in verdict and "step 5 while computing" in verdict


def test_one_that_beats_or_has_not_met_the_others_is_not(tmp_path: Path, clock: Clock) -> None:
    alive, _ = a_rank(tmp_path, 0, "computing"), a_rank(tmp_path, 1, "meeting the other ranks")
    assert not watch(clock, Heartbeats(tmp_path, {0: 1, 1: 2}, 10.0), 100, [alive])


def test_time_in_which_the_launcher_was_stopped_does_not_count(tmp_path: Path, clock: Clock) -> None:
    status = a_rank(tmp_path, 0, "computing")
    hearts = Heartbeats(tmp_path, {0: os.getpid()}, 10.0)
    assert not watch(clock, hearts, 5, [status])
    clock.now += 3600
    assert not watch(clock, hearts, 5, [])


def test_where_a_rank_hangs(tmp_path: Path, clock: Clock) -> None:
    a_rank(tmp_path, 3, "saving")
    stack = """Current thread 0x00007f5 (most recent call first):
  File "/x/site-packages/torch/nn/functional.py", line 9 in linear
  File "/x/models/llama.py", line 42 in forward
"""
    heartbeat.stack_file(tmp_path, 3).write_text(stack)
    hearts = Heartbeats(tmp_path, {3: 2**22 + 1}, 1.0)  # no such process
    verdict = watch(clock, hearts, 60, [])
    assert "does not answer: gone; it was last seen at step 5 while saving, in forward (models/llama.py:42)" in verdict
    assert "linear" in (tmp_path / "stacks.txt").read_text()
