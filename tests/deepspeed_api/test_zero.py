"""zero.Init, zero.GatheredParameters and the safe_get/safe_set functions, against plain models and plain torch."""

from __future__ import annotations

import pytest
import torch
from support import deepspeed_scenarios as scenarios
from support.ranks import run_ranks


@pytest.mark.parametrize("kind", ["tricks", "seeds", "llama", "tied", "gpt2"])
def test_born_divided_with_the_same_values(kind: str) -> None:
    """The values of the same code without Init (rank 0's, where seeds differ), and no whole replica on a rank."""
    ranks = run_ranks(scenarios.born_divided, 2, kind)
    expected = ranks[0]["plain"]
    for rank in ranks:
        assert rank["divided"].keys() == expected.keys()
        for name, value in rank["divided"].items():
            assert torch.equal(value, expected[name]), name
        assert rank["kinds"] == {"DTensor"}
        assert rank["held"] <= 0.62 * rank["all"]
    assert sum(rank["held"] for rank in ranks) >= ranks[0]["all"]
    if kind == "seeds":
        assert not torch.equal(ranks[1]["plain"]["table"], expected["table"])


@pytest.mark.parametrize("stage", [1, 3])
def test_init_changes_nothing_in_training(stage: int) -> None:
    assert run_ranks(scenarios.init_then_train, 2, stage, True) == run_ranks(scenarios.init_then_train, 2, stage, False)


@pytest.mark.parametrize("stage", [2, 3])
def test_gathered_parameters(stage: int) -> None:
    for result in run_ranks(scenarios.gathered, 2, stage):
        assert result["forward"] == pytest.approx(result["forward again"], abs=1e-6)
        assert all(result[name] for name in ("read", "mean", "discarded", "kept", "disabled")), result


@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)), 2, 3])
def test_fragments_equal_plain_torch(stage: int) -> None:
    reference = run_ranks(scenarios.plain_step, 1)[0]
    new = torch.arange(64.0).view(8, 8)
    for rank in run_ranks(scenarios.fragments, 2, stage):
        for kind, expected in reference.items():
            assert rank[kind].keys() == expected.keys()
            for name, value in expected.items():
                assert torch.allclose(rank[kind][name], value, atol=1e-5), (kind, name)
        assert rank["frozen"] is None and rank["no grad"] is None
        assert torch.equal(rank["set"][0], new * 2) and torch.equal(rank["set"][1], new + 1)
        assert rank["rows"] == ((8, 8) if stage == 0 else (4, 8))
        assert torch.equal(rank["set grad"], new)
