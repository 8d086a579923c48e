"""The watch on the allocator, with figures made up: what is picked, when it warns, and that it warns once."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.observe.memory import MemoryWatch, device_memory, pick

GIB = 2**30


def record(used: float, reserved: float, retries: int = 0) -> dict[str, Any]:
    return pick(
        {
            "allocated_bytes.all.current": 1,
            "allocated_bytes.all.peak": int(used * GIB),
            "reserved_bytes.all.current": 2,
            "reserved_bytes.all.peak": int(reserved * GIB),
            "num_alloc_retries": retries,
            "num_ooms": 7,
        }
    )


def test_figures() -> None:
    assert record(3, 4, 5) == {
        "allocated_bytes": 1, "allocated_peak_bytes": 3 * GIB, "reserved_bytes": 2, "reserved_peak_bytes": 4 * GIB,
        "alloc_retries": 5,
    }  # fmt: skip
    assert set(pick({}).values()) == {0}
    assert device_memory(torch.device("cpu"), None) == {}  # type: ignore[arg-type]


def test_holes_in_a_full_device() -> None:
    watch = MemoryWatch(80 * GIB)
    assert watch.warning({"loss": 1.0}) is None, "a CPU has no such figures"
    assert watch.warning(record(60, 74)) is None, "23% is within bounds"
    assert watch.warning(record(10, 40)) is None, "half of the device is free: no harm"
    told = watch.warning(record(50, 70))
    assert told and "70.0 GiB reserved for 50.0 GiB" in told
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in told and "train.micro_batch_size" in told
    assert watch.warning(record(50, 79)) is None, "once is enough"


def test_retries() -> None:
    watch = MemoryWatch(80 * GIB)
    told = watch.warning(record(70, 78, retries=1))
    assert told and "sorted anew 1 time," in told
    assert watch.warning(record(70, 78, retries=9)) is None
    assert watch.warning(record(50, 78, retries=9)), "holes are another matter"
