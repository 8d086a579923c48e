"""What the plan says a rank will hold, and where."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config.schema import Parallel, Run
from shardwise.parallel.offload.policy import disk_bytes, eager_share, held_by_place
from shardwise.parallel.zero.plusplus import describe_collectives
from shardwise.train.describe import _place

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
        train={"optimizer": "adamw8bit", "optimizer_in_backward": True, "max_grad_norm": None},
    )  # fmt: skip
    assert total(run) == pytest.approx({"device": 2.0, "cpu": 4.08})


def test_what_is_not_decided_yet_is_said_so() -> None:
    auto = {"optimizer": "cpu", "ratio": "auto"}
    on_gpu = held_by_place(a_run(parallel={"zero": 3}, offload=auto, device="cuda"), MILLION, 1)
    assert sum(on_gpu["auto"].values()) == 10 * MILLION and "cpu" not in on_gpu
    assert "decides at the start" in _place("auto", "cpu")[1] and "to the disk" in _place("auto", "disk")[1]
    on_cpu = a_run(parallel={"zero": 3}, offload=auto, device="cpu")  # nothing leaves: see fitting_ratio
    assert total(on_cpu) == pytest.approx({"device": 16.0})


@pytest.mark.parametrize(
    ("parallel", "ranks", "shard", "bytes_"),
    [
        ({"hpz_size": 2}, 2, 4, 2 / 2),
        ({"hpz_size": 2, "quantize_weights": True}, 2, 4, 1 / 2),
        ({"hpz_size": 1}, 4, 4, 2.0),  # a whole copy
        ({"hpz_size": 4}, 4, 4, 0.0),
        ({"quantize_gradients": True}, 4, 4, 2.0),  # one node: one hop, over whole gradients
        ({"quantize_gradients": True}, 1, 4, 2.0),
        ({"quantize_gradients": True}, 2, 4, 2 / 2),
        ({"quantize_gradients": True, "error_feedback": False}, 2, 4, 0.0),
        ({"quantize_gradients": True}, 1, 1, 0.0),
    ],
)
def test_zeropp_is_in_the_account(parallel: dict[str, Any], ranks: int, shard: int, bytes_: float) -> None:
    plain, more = (a_run(parallel={"zero": 3} | p, ranks=ranks) for p in ({}, parallel))
    assert total(more, shard)["device"] - total(plain, shard)["device"] == pytest.approx(bytes_)


def test_the_plan_has_the_widths_and_says_what_does_nothing() -> None:
    both = Parallel(zero=3, quantize_gradients=True, hpz_size=4)
    assert describe_collectives(both, 4, 4).startswith("; reduces in 4 bits, adding what rounding lost (qgZ); hpZ does")
    assert "reduces in 4 bits between nodes, 8 within" in describe_collectives(both, 4, 2)
    assert "reduces in 4 bits, " in describe_collectives(both, 4, 1)
    assert "hpZ does nothing: hpz_size 4 is the whole shard group" in describe_collectives(both, 4, 2)
    assert "then within 4 ranks (hpZ)" in describe_collectives(both, 8, 4)
    assert "keeps all of it on every rank (hpZ)" in describe_collectives(Parallel(zero=3, hpz_size=1), 8, 4)
    assert describe_collectives(Parallel(zero=3), 4, 4) == ""


def test_eager_share() -> None:
    away = {"optimizer": "cpu"}
    assert eager_share(a_run(offload=away)) == 0.0, "clipping must see all gradients first"
    assert 0 < eager_share(a_run(offload=away, train={"max_grad_norm": None})) < 1
    assert eager_share(a_run(offload=away, train={"max_grad_norm": None}, precision="fp16")) == 0.0
    assert eager_share(a_run(train={"max_grad_norm": None, "optimizer_in_backward": True})) == 1.0
    assert eager_share(a_run(train={"max_grad_norm": None})) == 0.0
