"""Experts on several ranks, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import expert
from support.ranks import run_ranks

from shardwise.config.methods import Lora, Qlora

EXACT = 1e-11
# Bias and transposed weights (gpt_oss), shared experts (deepseek_v3), flat weights (dbrx), rows that come sorted
# (jetmoe) or for every expert (llama4).
FAMILIES = ["mixtral", "gpt_oss", "deepseek_v3", "dbrx", "jetmoe", "llama4_text"]
TO_ONE, UNEVEN, SILENT = [[[0, 1]] * 5, [[1, 0]] * 3], [[[3], [0], [0]], [[2]] * 7], [[[0, 2]] * 4, []]
# Starting ranks takes longer than most of what they do: each of these two fixtures starts them once.
ON_TWO: dict[str, tuple[Any, ...]] = {
    "families": ("trials", FAMILIES),
    "all to one rank": ("skewed", "mixtral", TO_ONE),
    "one expert per token": ("skewed", "mixtral", UNEVEN),
    "a rank without tokens": ("skewed", "mixtral", SILENT),
    "recomputed": ("skewed", "gpt_oss", TO_ONE, True),
    "wire": ("wire", "mixtral"),
    "loads": ("loads", "mixtral"),
    "lora": ("adapted", "mixtral", Lora()),
    "qlora": ("adapted", "mixtral", Qlora()),
    "dense": ("refused", "llama"),
    "odd": ("refused", "mixtral", 3),
    "other": ("refused", "longcat_flash"),
}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(expert.several, 2, ON_TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    calls = {
        "sharded": ("sharded", "mixtral", (4,), 2, 3, str(tmp_path_factory.mktemp("checkpoint"))),
        "all replicated": ("beside_tensor", "mixtral", 5, (True, True, True)),
        "some replicated": ("beside_tensor", "mixtral", 5, (False, True, True)),
    }
    return run_ranks(expert.several, 4, calls)


def test_the_ways_in_which_models_call_their_experts(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert all(verdict.right for verdict in found["families"].values()), found["families"]


@pytest.mark.parametrize("what", ["all to one rank", "one expert per token", "a rank without tokens", "recomputed"])
def test_uneven_loads(two: list[dict[str, Any]], what: str) -> None:
    for found in two:
        assert max(found[what].values()) < EXACT, found[what]


@pytest.mark.parametrize("what", ["all replicated", "some replicated"])
def test_tokens_that_tensor_ranks_share_are_sent_once(four: list[dict[str, Any]], what: str) -> None:
    """Five tokens, which two tensor ranks cannot share evenly."""
    for found in four:
        assert max(found[what].values()) < EXACT, found[what]


def test_with_sharding_from_meta_and_through_a_checkpoint(four: list[dict[str, Any]]) -> None:
    for found in four:
        _check_sharded(found["sharded"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "group", "stage", "few"),
    [("gpt_oss", (2, 2), 2, 2, False), ("mixtral", (4,), 4, 3, False), ("mixtral", (4,), 2, 3, True)],
)
def test_other_groups_and_stages(
    name: str, sizes: tuple[int, ...], group: int, stage: int, few: bool, tmp_path: Path
) -> None:
    for found in run_ranks(expert.sharded, 4, name, sizes, group, stage, str(tmp_path), few):
        _check_sharded(found)


def _check_sharded(found: dict[str, Any]) -> None:
    assert found["verdict"].right, found["verdict"]
    assert found["filled"], "the weights' parts are not where files have them"
    assert found["loaded"], "a checkpoint does not give back what it was given"
    assert found["held"] == found["experts"] / 4  # divided by expert, and the rest by FSDP


def test_bytes_on_the_wire(two: list[dict[str, Any]]) -> None:
    """Per layer two all-to-alls of the routed rows forward and two backward; the counts are a trifle."""
    moved = [found["wire"] for found in two]
    assert sum(one["rows"] for one in moved) == sum(one["formula"] for one in moved)
    for one in moved:
        assert one["calls"] == 5 * one["layers"]
        assert one["counts"] == one["layers"] * 4 * 8


def test_loads_by_layer_and_expert(two: list[dict[str, Any]]) -> None:
    """Counted once although computed twice; the same whether experts are spread or not."""
    for found in (one["loads"] for one in two):
        assert torch.equal(found["wanted"], found["got"])
        assert found["wanted"].sum(1).tolist() == [4 * 16 * 2] * len(found["layers"])
        assert found["balance"].worst >= found["balance"].mean > 1
        assert found["reset"] == 0


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_on_the_dense_layers(two: list[dict[str, Any]], method: str) -> None:
    """Experts are frozen, or in four bits."""
    for found in (one[method] for one in two):
        assert found["trained"] > 10
        assert found["worst"] < 1e-3


def test_what_cannot_be_spread_says_why(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["dense"] == "has no experts"
        assert "3 experts cannot be divided over 2 ranks" in found["odd"]
        assert "LongcatFlashExperts" in found["other"]
