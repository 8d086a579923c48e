"""The loss scale step by step: against DeepSpeed's, at its least, when it stays, and over a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config.schema import LossScale
from shardwise.optim.scaler import LossScaler

REFERENCE = json.loads((Path(__file__).parent / "deepspeed_reference.json").read_text())


def step(scaler: LossScaler, overflow: bool) -> bool:
    """One step with a gradient of 1, or of infinity; whether the parameter moved."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale((weight * (torch.inf if overflow else 1.0)).sum()).backward()
    scaler.unscale_(optimizer)
    if not overflow:
        torch.testing.assert_close(weight.grad, torch.ones(2))
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(weight.detach(), torch.ones(2))


@pytest.mark.parametrize("case", REFERENCE["scalers"], ids=lambda c: f"hysteresis-{c['settings']['delayed_shift']}")
def test_the_scale_is_deepspeed_s(case: dict[str, Any]) -> None:
    """The same overflows give the same scale at every step, and the same step at which nothing helps any more."""
    given = case["settings"]
    settings = LossScale(
        initial=given["init_scale"],
        growth_interval=given["scale_window"],
        hysteresis=given["delayed_shift"],
        consecutive_hysteresis=given["consecutive_hysteresis"],
        minimum=given["min_scale"],
    )
    scaler = LossScaler("cpu", settings, enabled=True)
    found = []
    for number, overflow in enumerate(case["overflows"]):
        found.append(scaler.get_scale())
        assert step(scaler, overflow) is not overflow, "an overflow skips the update, and nothing else does"
        assert scaler.exhausted is (number == case["failed"])
    assert found == case["scales"]
    assert len(set(found)) > 2


def test_a_restart_goes_on_with_scale_and_counters() -> None:
    settings = LossScale(growth_interval=5, hysteresis=2)
    pattern = [False, False, True, False, True, False, False, False, False, False, False, True, True]
    whole = LossScaler("cpu", settings, enabled=True)
    for overflow in pattern:
        step(whole, overflow)
    for cut in range(1, len(pattern)):
        first, second = (LossScaler("cpu", settings, enabled=True) for _ in range(2))
        for overflow in pattern[:cut]:
            step(first, overflow)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for overflow in pattern[cut:]:
            step(second, overflow)
        assert second.state_dict() == whole.state_dict()


def test_a_fixed_scale_stays() -> None:
    scaler = LossScaler("cpu", LossScale(value=128, growth_interval=1), enabled=True)
    for overflow in (False, True, False, False, True, True):
        assert step(scaler, overflow) is not overflow
        assert scaler.get_scale() == 128
    assert not scaler.exhausted
    scaler.load_state_dict({"scale": 4.0, "_growth_tracker": 1})
    assert scaler.get_scale() == 128, "what the run says now counts"


def test_the_least_scale() -> None:
    scaler = LossScaler("cpu", LossScale(initial=4, minimum=2), enabled=True)
    assert scaler.trouble() is None
    step(scaler, True)
    assert scaler.get_scale() == 2 and scaler.trouble() is None
    step(scaler, True)
    assert scaler.get_scale() == 2
    assert "at the least loss scale (2)" in str(scaler.trouble())


def test_off_it_does_nothing() -> None:
    scaler = LossScaler("cpu", LossScale(), enabled=False)
    step(scaler, False)
    assert scaler.get_scale() == 1 and scaler.state_dict() == {} and not scaler.exhausted


def test_a_rank_without_a_loss_has_the_scale() -> None:
    """Of a pipeline's stages only the last computes a loss; all unscale."""
    scaler = LossScaler("cpu", LossScale(initial=8.0), enabled=True)
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 16.0)
    scaler.unscale_(optimizer := torch.optim.SGD([parameter], lr=1.0))
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [-1.0, -1.0] and scaler.get_scale() == 8.0
