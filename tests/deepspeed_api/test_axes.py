"""A DeepSpeed script with `tensor_parallel` and `sequence_parallel_size`: the losses of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import deepspeed_scenarios as scenarios
from support.ranks import run_ranks

BOUND = 1e-5
TENSOR = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2}


def config(micro: int, stage: int, **axes: Any) -> dict[str, Any]:
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": micro}
    return batch | {"zero_optimization": {"stage": stage}} | axes


@pytest.mark.parametrize(
    ("ranks", "axes", "stage", "divided"),
    [
        pytest.param(2, TENSOR, 1, False, id="tensor"),
        pytest.param(2, SEQUENCE, 2, False, id="sequence", marks=pytest.mark.slow),
        pytest.param(4, TENSOR | SEQUENCE, 1, False, id="both", marks=pytest.mark.slow),
        pytest.param(2, TENSOR, 3, True, id="tensor, zero.Init", marks=pytest.mark.slow),
    ],
)
def test_axes_of_the_config(ranks: int, axes: dict[str, Any], stage: int, divided: bool, tmp_path: Path) -> None:
    """The loader reads by data rank; the checkpoint resumes on one rank, and the saved model is whole."""
    plain, given = config(4, 1), config(4, stage, **axes)
    one = run_ranks(scenarios.over_axes, 1, plain, str(tmp_path / "one"), 4, False)[0]
    found = run_ranks(scenarios.over_axes, ranks, given, str(tmp_path / "axes"), 3, False, divided)
    sizes = (axes.get("tensor_parallel", {}).get("autotp_size", 1), axes.get("sequence_parallel_size", 1))
    assert all(rank["place"] == (1, 0, 8) and rank["mpu"] == sizes for rank in found)
    saved = torch.load(tmp_path / "axes" / "model.bin")
    for name, value in found[0]["state"].items():
        assert torch.equal(saved[name], value)
    rest = run_ranks(scenarios.over_axes, 1, plain, str(tmp_path / "axes"), 1, True)[0]
    figures = found[0]["figures"] + rest["figures"]
    assert max(abs(a - b) for a, b in zip(figures, one["figures"], strict=True)) <= BOUND
    apart = [(rest["state"][name] - value).abs().max() for name, value in one["state"].items()]
    assert max(apart) <= 1e-4
