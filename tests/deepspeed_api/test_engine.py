"""What DeepSpeedEngine does and answers."""

from __future__ import annotations

import pytest
from support import deepspeed_scenarios as scenarios
from support.ranks import run_ranks


@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_boundaries_by_hand_equal_counted_ones(stage: int) -> None:
    result = run_ranks(scenarios.boundaries, 2, stage)[0]
    assert result["counted"][-1] < result["counted"][0]
    assert ("no_sync" in result) == (stage == 1)
    for losses in result.values():
        assert losses == pytest.approx(result["counted"], abs=1e-6)


def test_surface() -> None:
    ranks = run_ranks(scenarios.surface, 2)
    for number, rank in enumerate(ranks):
        assert rank["sizes"] == (8, 2, 2) and rank["larger"] == (12, 2, 3)
        assert rank["loader"] == (5, 5, 10)
        assert rank["same"] and rank["mine is"] == (number == 0, number), "rank 0's model counts"
        assert rank["before"] == (None, 0, False)
        assert rank["decay"] == [0.3, 0.0]
        assert rank["names"] == ["module.blocks.0.0.bias", "module.blocks.0.0.weight"]
        assert rank["of the model"] == 1.5
        assert rank["rates"] == pytest.approx([0, 0, 0, 0, 0.005, 0.005])
        assert rank["after"] == (3, 6, 24, 0) and rank["one more"] == 4
        assert rank["norm"] == pytest.approx(ranks[0]["norm"]) and rank["norm"] > 0
        assert rank["answers"] == (2, 0.7, False, False, 1.0, 2, 2, number, "cpu")
        assert "multiple of 4" in rank["mistakes"][0] and "stages 2 and 3" in rank["mistakes"][1]
        assert "nothing" in rank["mistakes"][2]


def test_breakdown_is_printed() -> None:
    for rank, said in enumerate(run_ranks(scenarios.breakdown, 2)):
        assert ("'forward': " in said and "reduce_scatter" in said and "step 2" in said) == (rank == 0), said


def test_fp16_overflow(cpu_precision_env: dict[str, str]) -> None:
    """Skipped updates are counted, the schedule waits for them, and two overflows halve the scale."""
    ranks = run_ranks(scenarios.overflow, 2, env=cpu_precision_env)
    for rank in ranks:
        seen = rank["seen"]
        assert rank["skipped"] == rank["not applied"] >= 3 and rank["moved"]
        assert [entry[1] for entry in seen[:3]] == [2.0**40, 2.0**39, 2.0**38]
        assert seen[0][2] == -1 and seen[-1][2] == -1 + sum(entry[0] for entry in seen)
    assert ranks[0]["seen"] == ranks[1]["seen"]


def test_wrong_arguments_are_named() -> None:
    """Before anything is printed or exchanged, and on every rank."""
    for told in run_ranks(scenarios.wrong_arguments, 2):
        assert told["printed"] == ""
        assert told["model"].startswith("model = 'x': is a str, not a torch.nn.Module")
        assert told["optimizer"].startswith("optimizer = 3: is a int, neither an optimizer")
        assert told["config"].startswith("config = 3: is a int, neither a dictionary nor a path")
        assert told["number"].startswith("loss = 3.0: is a float, not a tensor")
        assert told["shape"].startswith("loss = (2, 3): is a tensor of this shape")
        assert "does not depend on the model's parameters" in told["detached"]
        assert told["save_dir"].startswith("save_dir = '/proc/x': cannot be made (")
