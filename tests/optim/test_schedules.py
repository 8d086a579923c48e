"""The learning rate at every step: where it starts, where it turns, where it ends."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import check_each

from shardwise.config.schema import Train
from shardwise.optim.schedules import learning_rate, set_rates

PEAK = 2e-3
SCHEDULES = ("cosine", "linear", "constant", "wsd")


def rates(total: int, **settings: Any) -> list[float]:
    train = Train(learning_rate=PEAK, **settings)
    return [learning_rate(train, step, total) / PEAK for step in range(total)]


def test_cosine() -> None:
    found = rates(100, schedule="cosine", warmup=0)
    assert found[0] == 1 and found[50] == pytest.approx(0.5)
    assert found[25] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert found[99] == pytest.approx((1 + math.cos(math.pi * 0.99)) / 2) and 0 < found[99] < 1e-3


def test_linear() -> None:
    found = rates(100, schedule="linear", warmup=0)
    assert found[0] == 1 and found[50] == pytest.approx(0.5) and found[99] == pytest.approx(0.01)


def test_constant() -> None:
    assert rates(100, schedule="constant", warmup=0, min_lr_ratio=0.1) == [1.0] * 100


def test_wsd() -> None:
    """Stable for 80 steps, then down in a line; no step is wasted on a rate of zero."""
    found = rates(100, schedule="wsd", warmup=0, decay="20%")
    assert found[:81] == [1.0] * 81
    assert found[90] == pytest.approx(0.5) and found[99] == pytest.approx(0.05)
    assert rates(100, schedule="wsd", warmup=10, decay="100%") == rates(100, schedule="linear", warmup=10)
    assert rates(100, schedule="wsd", warmup=10, decay=1000) == rates(100, schedule="linear", warmup=10)
    assert rates(100, schedule="wsd", warmup=10, decay=0) == rates(100, schedule="constant", warmup=10)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up(schedule: str) -> None:
    """A line from a tenth of the peak to the peak; what follows is the schedule over the steps that are left."""
    found = rates(100, schedule=schedule, warmup="10%")
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10] == 1
    if schedule in ("cosine", "linear"):
        assert found[10:] == pytest.approx(rates(90, schedule=schedule, warmup=0))
    assert rates(100, schedule=schedule, warmup=10) == found, "ten steps are ten percent of a hundred"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_final_learning_rate(schedule: str) -> None:
    """The curve that would end at zero, squeezed so that it ends at the share; at a share of 1 it is flat."""
    plain = rates(1000, schedule=schedule, warmup=10)
    raised = rates(1000, schedule=schedule, warmup=10, min_lr_ratio="10%")
    assert raised[:10] == plain[:10], "the warm-up begins at zero all the same"
    assert raised[10:] == pytest.approx([0.1 + 0.9 * rate for rate in plain[10:]])
    assert 0.1 < raised[-1] < 0.106
    assert rates(1000, schedule=schedule, warmup=0, min_lr_ratio=1.0) == pytest.approx([1.0] * 1000)


def test_always_between_zero_and_the_peak() -> None:
    """Rises, then falls; never zero within the run, never above the peak; also where the warm-up outlasts the run."""

    def check(case: tuple[str, object, int]) -> None:
        schedule, warmup, total = case
        found = rates(total, schedule=schedule, warmup=warmup)
        assert all(0 < rate <= 1 for rate in found)
        top = found.index(max(found))
        assert found[: top + 1] == sorted(found[: top + 1]) and found[top:] == sorted(found[top:], reverse=True)
        if warmup in ("100%", 1000):
            assert found == pytest.approx([(step + 1) / total for step in range(total)]), "the full run, no more"

    check_each(product(SCHEDULES, [0, 1, 5, "3%", "100%", 1000], [1, 2, 3, 7, 100]), check)


REFERENCE = json.loads((Path(__file__).parent / "deepspeed_reference.json").read_text())
PEAKS = ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr")


@pytest.mark.parametrize("case", REFERENCE["schedules"], ids=lambda c: f"{c['type']}-{len(c['params'])}")
def test_deepspeed_s_schedules_are_deepspeed_s(case: dict[str, Any]) -> None:
    """Rate and momentum of every update, as printed by DeepSpeed itself (benchmarks/deepspeed_reference.py)."""
    own = {name: value for name, value in case["params"].items() if name not in PEAKS}
    train = Train(learning_rate=REFERENCE["peak"], betas=(0.9, 0.999), schedule={"type": case["type"]} | own)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=train.betas)
    found: list[float] = []
    momenta: list[float] = []
    for step in range(REFERENCE["updates"]):
        assert set_rates(optimizer, train, step, REFERENCE["updates"]) == optimizer.param_groups[0]["lr"]
        found.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"][0])
    assert found == pytest.approx(case["rates"], rel=0, abs=1e-15)
    assert momenta == pytest.approx(case["momenta"], rel=0, abs=1e-15)
    assert len(set(found)) > 2


def test_deepspeed_s_schedules_end_with_the_run() -> None:
    """Without total_num_steps the decay ends where the run does; a warm-up may be a share of it."""
    schedule = {"type": "WarmupDecayLR", "warmup_num_steps": "10%"}
    named = {"type": "WarmupDecayLR", "warmup_num_steps": 10, "total_num_steps": 100}
    assert rates(100, schedule=schedule) == rates(100, schedule=named)
    assert rates(50, schedule=schedule) != rates(50, schedule=named)
