"""What the plan says a rank will hold, and where."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config.schema import Run
from shardwise.zero.policy import disk_bytes, eager_share, held_by_place

MILLION = 1_000_000


def a_run(**changes: Any) -> Run:
    return Run.model_validate({"model": "m", "data": {"train": "t"}, "precision": "bf16", **changes})


def total(run: Run, shard: int = 1) -> dict[str, float]:
    """Bytes per parameter by place."""
    return {p: sum(k.values()) / MILLION for p, k in held_by_place(run, MILLION, shard).items()}


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ({}, {"device": 16.0}),  # fp32 weights, gradients and two moments; working weights block by block
        ({"optimizer": "cpu"}, {"device": 6.0, "cpu": 10.0}),
        ({"optimizer": "cpu", "ratio": 0.5}, {"device": 11.0, "cpu": 5.0}),
        ({"optimizer": "disk", "parameters": "cpu"}, {"cpu": 6.0, "disk": 10.0}),
        ({"optimizer": "disk", "parameters": "disk"}, {"disk": 16.0}),
    ],
)
def test_held_by_place(offload: dict[str, Any], expected: dict[str, float]) -> None:
    run = a_run(parallel={"zero": 3}, offload=offload)
    assert total(run) == pytest.approx(expected)
    assert total(run, 4) == pytest.approx({place: size / 4 for place, size in expected.items()})
    on_disk = expected.get("disk", 0.0)
    assert disk_bytes(run, MILLION) == pytest.approx(on_disk * MILLION)


def test_coded_states_and_freed_gradients() -> None:
    run = a_run(
        parallel={"zero": 3}, offload={"optimizer": "cpu"},
        train={"optimizer": "adamw8bit", "in_backward": True, "clip": None},
    )  # fmt: skip
    assert total(run) == pytest.approx({"device": 2.0, "cpu": 4.08})


def test_eager_share() -> None:
    away = {"optimizer": "cpu"}
    assert eager_share(a_run(offload=away)) == 0.0, "clipping must see all gradients first"
    assert 0 < eager_share(a_run(offload=away, train={"clip": None})) < 1
    assert eager_share(a_run(offload=away, train={"clip": None}, precision="fp16")) == 0.0
    assert eager_share(a_run(train={"clip": None, "in_backward": True})) == 1.0
    assert eager_share(a_run(train={"clip": None})) == 0.0
