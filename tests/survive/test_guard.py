"""What counts as a leap of the loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.config.schema import Guard as Settings
from shardwise.train.guard import FEWEST, LossGuard


def guard_of(tmp_path: Path) -> LossGuard:
    world: Any = SimpleNamespace(is_main=True)
    guard = LossGuard(Settings(spike=6.0), world, tmp_path, scaled=False)
    for step in range(FEWEST):  # a deviation of 0.1 around 2, over 1,000 tokens a step
        assert guard._spike(2.1 if step % 2 else 1.9, 1000) == ""
    return guard


@pytest.mark.parametrize(
    ("loss", "units", "leaps"),
    [(2.5, 1000, False), (2.7, 1000, True), (2.7, 100, False), (3.8, 100, False), (4.0, 100, True), (2.7, 9000, True)],
)
def test_a_step_of_few_tokens_may_scatter_more(tmp_path: Path, loss: float, units: int, leaps: bool) -> None:
    """Six deviations; a mean over a tenth of the tokens has √10 times the deviation."""
    assert bool(guard_of(tmp_path)._spike(loss, units)) is leaps
