"""The watch over a host's memory: what it reads, when it speaks, and that it does not speak of a passing peak."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from shardwise.core.host_memory import HostMemoryWatch, host_memory, shortage

GIB = 1 << 30


def test_the_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 4}\n")
    assert host_memory(tmp_path) == (3 * GIB // 4, GIB)
    (tmp_path / "memory.max").write_text("max\n")
    left, whole = host_memory(tmp_path)
    assert whole == psutil.virtual_memory().total and 0 < left <= whole


def watched(readings: list[int]) -> list[str]:
    """What is told over a course of bytes that are left of 10 GiB."""
    told: list[str] = []
    over = threading.Event()
    course: Iterator[int] = iter(readings)

    def read() -> tuple[int, int]:
        left = next(course, None)
        if left is None:
            over.set()
            return 10 * GIB, 10 * GIB
        return left, 10 * GIB

    with HostMemoryWatch(told.append, read, lambda code: over.set(), every=0.001):
        assert over.wait(10)
    return told


def test_it_speaks_when_it_stays_low() -> None:
    (words,) = watched([GIB, GIB // 100, GIB // 100, GIB])
    assert "nearly gone: 10 MiB of 10.0 GiB left" in words and "GiB\n    →" in words
    assert watched([GIB, GIB // 100, GIB, GIB // 100, GIB]) == []


def test_who_holds_it() -> None:
    assert "most is held by " in shortage(1, GIB)
