"""Experts on several ranks, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import expert
from support.ranks import run_ranks

from shardwise.config.methods import Lora, Qlora

EXACT = 1e-11


def test_the_ways_in_which_models_call_their_experts() -> None:
    """Bias and transposed weights (gpt_oss), shared experts (deepseek_v3), rows sorted (jetmoe) or for all (llama4)."""
    for found in run_ranks(expert.trials, 2, ["mixtral", "gpt_oss", "deepseek_v3", "dbrx", "jetmoe", "llama4_text"]):
        assert all(verdict.right for verdict in found.values()), found


@pytest.mark.parametrize(
    ("name", "sizes", "group", "stage", "few"),
    [
        ("mixtral", (4,), 2, 3, False),
        pytest.param("gpt_oss", (2, 2), 2, 2, False, marks=pytest.mark.slow),
        pytest.param("mixtral", (4,), 4, 3, False, marks=pytest.mark.slow),
        pytest.param("mixtral", (4,), 2, 3, True, marks=pytest.mark.slow),
    ],
)
def test_with_sharding_from_meta_and_through_a_checkpoint(
    name: str, sizes: tuple[int, ...], group: int, stage: int, few: bool, tmp_path: Path
) -> None:
    for found in run_ranks(expert.sharded, 4, name, sizes, group, stage, str(tmp_path), few):
        assert found["verdict"].right, found["verdict"]
        assert found["filled"], "the weights' parts are not where files have them"
        assert found["loaded"], "a checkpoint does not give back what it was given"
        assert found["held"] == found["experts"] / 4  # divided by expert, and the rest by FSDP


def test_ranks_with_few_tokens_or_none() -> None:
    """All tokens to the experts of rank 0; one expert per token and unlike numbers; a rank that has nothing to send."""
    to_one, uneven, silent = [[[0, 1]] * 5, [[1, 0]] * 3], [[[3], [0], [0]], [[2]] * 7], [[[0, 2]] * 4, []]
    stacks = [("mixtral", to_one), ("mixtral", uneven), ("mixtral", silent), ("gpt_oss", to_one, True)]  # recomputed
    for found in run_ranks(expert.several, 2, [("skewed", one) for one in stacks]):
        for what, apart in zip(stacks, found, strict=True):
            assert max(apart.values()) < EXACT, (what, apart)


def test_tokens_that_tensor_ranks_share_are_sent_once() -> None:
    """All given as replicated DTensors, or some of them; a number of tokens that tensor ranks cannot share evenly."""
    calls = [("beside_tensor", ("mixtral", 5, kinds)) for kinds in ((True, True, True), (False, True, True))]
    for found in run_ranks(expert.several, 4, calls):
        assert all(max(apart.values()) < EXACT for apart in found), found


def test_bytes_on_the_wire() -> None:
    """Per layer two all-to-alls of the routed rows forward and two backward; the counts are a trifle."""
    found = run_ranks(expert.wire, 2, "mixtral")
    assert sum(moved["rows"] for moved in found) == sum(moved["formula"] for moved in found)
    for moved in found:
        assert moved["calls"] == 5 * moved["layers"]
        assert moved["counts"] == moved["layers"] * 4 * 8


def test_loads_by_layer_and_expert() -> None:
    """Counted once although computed twice; the same whether experts are spread or not."""
    for found in run_ranks(expert.loads, 2, "mixtral"):
        assert torch.equal(found["wanted"], found["got"])
        assert found["wanted"].sum(1).tolist() == [4 * 16 * 2] * len(found["layers"])
        assert found["balance"].worst >= found["balance"].mean > 1
        assert found["reset"] == 0


def test_adapters_on_the_dense_layers() -> None:
    """Experts are frozen, or in four bits."""
    for found in run_ranks(expert.several, 2, [("adapted", ("mixtral", method)) for method in (Lora(), Qlora())]):
        for one in found:
            assert one["trained"] > 10
            assert one["worst"] < 1e-3


def test_what_cannot_be_spread_says_why() -> None:
    calls = [("refused", (name,)) for name in ("llama", "mixtral", "longcat_flash")]
    for dense, odd, other in run_ranks(expert.several, 3, calls):
        assert dense == "has no experts"
        assert "4 experts cannot be divided over 3 ranks" in odd
        assert "LongcatFlashExperts" in other
