"""Standard errors against the textbook and against resampling."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from shardwise.evaluate.figures import Figure, by_group, difference, ratio
from shardwise.evaluate.table import format_figure


def test_the_error_of_a_share() -> None:
    right = [1.0, 0.0, 0.0, 1.0, 1.0]
    figure = ratio("accuracy", right)
    assert figure.value == 0.6 and figure.count == 5
    assert figure.error == pytest.approx(np.std(right, ddof=1) / math.sqrt(5))
    assert ratio("accuracy", [1.0]).error is None and math.isnan(ratio("accuracy", []).value)


def test_the_error_of_a_ratio_is_that_of_resampling() -> None:
    rng = np.random.default_rng(0)
    units = rng.integers(50, 200, 400).astype(float)
    sums = units * rng.normal(2.0, 0.3, 400)
    other = sums + units * rng.normal(0.05, 0.02, 400)
    one, two = ratio("loss", sums, units), ratio("loss", other, units)
    picks = [rng.integers(0, 400, 400) for _ in range(4000)]
    assert one.error == pytest.approx(np.std([sums[p].sum() / units[p].sum() for p in picks]), rel=0.05)
    gap = difference(two, one)
    assert gap is not None and gap.paired and gap.clear
    assert gap.error == pytest.approx(np.std([(other - sums)[p].sum() / units[p].sum() for p in picks]), rel=0.05)
    assert gap.error < one.error / 5  # the items' own spread cancels


def test_differences_that_are_not_item_by_item() -> None:
    assert difference(ratio("loss", [1, 2], [3, 4]), ratio("loss", [1, 2], [3, 5])) is None
    gap = difference(Figure("acc", 0.5, 0.03), Figure("acc", 0.4, 0.04))
    assert gap is not None and gap.error == pytest.approx(0.05) and not gap.paired
    gap = difference(Figure("acc", 0.5), Figure("acc", 0.4, 0.04))
    assert gap is not None and gap.error is None and not gap.clear


def test_items_that_could_not_be_measured_are_no_items() -> None:
    """A judge whose grades can be read now and then: one grade has no spread, none at all is no value."""
    one = ratio("grade", [7.0, 0.0, 0.0], [1.0, 0.0, 0.0])
    assert one.value == 7.0 and one.count == 1 and one.error is None
    two = ratio("grade", [7.0, 0.0, 4.0], [1.0, 0.0, 1.0])
    assert two.count == 2 and two.error == pytest.approx(np.std([7, 4], ddof=1) / math.sqrt(2))
    none = ratio("grade", [0.0, 0.0], [0.0, 0.0])
    assert math.isnan(none.value) and none.count == 0 and none.error is None
    assert json.loads(json.dumps(none.to_json(), allow_nan=False))["value"] is None
    assert difference(none, none) is None


def test_groups() -> None:
    found = by_group("accuracy", [1.0, 0.0, 1.0], ["b", "a", None])
    assert {name: f.value for name, f in found.items()} == {"a": 0.0, "b": 1.0}


def test_a_loss_of_one_batch_is_no_count() -> None:
    assert format_figure(Figure("loss", 0.6995, count=1)) == "0.6995"  # it has no error, and was once told as 1
    assert [format_figure(Figure(name, 3, count=5)) for name in ("win", "tie", "loss")] == ["3", "3", "3"]
