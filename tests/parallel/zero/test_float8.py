"""Gathers in fp8: the same training as with gathers in bf16, to the bit, in half of the bytes; evaluated in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import float8
from support.families import config_of
from support.ranks import run_ranks
from support.tiny import LLAMA, tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.config.resolve import check_parallel
from shardwise.core.errors import UserError
from shardwise.parallel.offload.policy import float8_gathers
from shardwise.parallel.zero.plusplus import describe_collectives

WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128}
HYBRID = {"zero": 3, "dp_shard_size": 2}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float8")
    tokenizer_folder(folder / "tokenizer")
    return folder


def a_run(shared: Path, name: str, gather: str, parallel: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Accumulates, and evaluates in between."""
    model = {"config": changes.pop("config", WIDE), "tokenizer": str(shared / "tokenizer")}
    usual = {
        "precision": "bf16", "fp8": {"recipe": "tensorwise", "min_features": 16, "gather": gather}, "train__steps": 4,
        "data__eval": "5%", "train__eval_every": 2, "train__micro_batch_size": 1,
    }  # fmt: skip
    return tiny_run(shared, model, parallel=parallel, output=str(shared / f"{name}-{gather}"), **(usual | changes))


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = all(a[key] == b[key] for key in ("losses", "norms", "evaluated"))
    return same and all(torch.equal(a["final"][name], b["final"][name]) for name in a["final"])


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero-3": (2, {"zero": 3}, {}),
    "zero-1": (2, {"zero": 1}, {}),
    "zero-2": (2, {"zero": 2}, {}),
    "hybrid": (4, HYBRID, {}),
    "hybrid-2": (4, {"zero": 2, "dp_shard_size": 2}, {}),
    "uneven": (3, {"zero": 3}, {}),
    "hpz": (4, {"zero": 3, "hpz_size": 2}, {"recompute": "full"}),
    "qgz": (2, {"zero": 3, "quantize_gradients": True}, {}),
    "recompute": (2, {"zero": 3}, {"recompute": "full"}),
    "bucket": (2, {"zero": 3, "bucket": 60_000}, {}),
    "split": (2, {"zero": 3}, {"train__master_weights": "split"}),
    "offload": (2, {"zero": 2}, {"offload__optimizer": "cpu", "train__max_grad_norm": None}),
    "disk": (2, {"zero": 3}, {"offload__optimizer": "disk"}),
    "in-backward": (2, {"zero": 3}, {"train__optimizer_in_backward": True, "train__max_grad_norm": None}),
    "gpt2": (2, {"zero": 3}, {"config": config_of("gpt2")}),
    "mixtral": (2, {"zero": 3}, {"config": config_of("mixtral")}),
    "compiled": (2, {"zero": 3}, {"compile": True}),
    "kept": (2, {"zero": 3}, {"fp8__modules_to_not_convert": ["down_proj"]}),
}
QUICK = ("zero-1", "hybrid")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_same_to_the_bit(name: str, shared: Path, cpu_precision_env: dict[str, str]) -> None:
    ranks, parallel, changes = CASES[name]
    made = {}
    for gather in ("bf16", "fp8"):
        run = a_run(shared, name, gather, parallel, **changes)
        made[gather] = run_ranks(float8.train_and_count, ranks, run, env=cpu_precision_env)[0]
    assert equal(made["bf16"], made["fp8"])
    less = 0.98 if name == "mixtral" else 0.9  # most of whose weights are experts
    assert made["fp8"]["bytes"]["all_gather"] < less * made["bf16"]["bytes"]["all_gather"]
    assert len(made["fp8"]["losses"]) == 4 and len(made["fp8"]["evaluated"]) == 2


def test_a_wrong_scale_would_be_seen(shared: Path, cpu_precision_env: dict[str, str]) -> None:
    """As one would be that is not renewed: a weight's largest value grows by more than this in a step."""
    runs = [a_run(shared, f"wrong-{factor}", "fp8", {"zero": 3}, train__steps=1) for factor in (1.0, 0.99)]
    right, wrong = (
        run_ranks(float8.train_and_count, 2, run, factor, env=cpu_precision_env)[0]
        for run, factor in zip(runs, (1.0, 0.99), strict=True)
    )
    assert not equal(right, wrong)


def test_resumed_it_is_the_same(shared: Path, cpu_precision_env: dict[str, str]) -> None:
    """The scales are those of the weights that were loaded, not of those that were made first."""
    run = a_run(shared, "whole", "fp8", {"zero": 3}, checkpoint__every=2)
    whole = run_ranks(float8.train_and_count, 2, run, env=cpu_precision_env)[0]
    rest = run | {"output": str(shared / "rest"), "resume": f"{run['output']}/checkpoints/step-00000002"}
    for gather in ("fp8", "bf16"):
        rest["output"], rest["fp8"] = str(shared / f"rest-{gather}"), run["fp8"] | {"gather": gather}
        resumed = run_ranks(float8.train_and_count, 2, rest, env=cpu_precision_env)[0]
        assert resumed["losses"] == whole["losses"][2:]
        assert all(torch.equal(whole["final"][name], resumed["final"][name]) for name in whole["final"])


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluation_sees_what_is_not_rounded(stage: int, shared: Path, cpu_precision_env: dict[str, str]) -> None:
    """In the middle of a step too, when stages 1 and 2 have gathered to train and would keep it."""
    run = a_run(shared, f"seen-{stage}", "auto", {"zero": stage})
    for seen in run_ranks(float8.gathered, 2, run, env=cpu_precision_env):
        assert torch.equal(seen["evaluation"], seen["own"].bfloat16())
        rounded = seen["training"]
        assert not torch.equal(rounded, seen["evaluation"])
        assert rounded.abs().max() == seen["evaluation"].abs().max()
        assert len(rounded.abs().unique()) <= 127  # codes that are there, without their sign


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_on_the_wire(stage: int, shared: Path, cpu_precision_env: dict[str, str]) -> None:
    """A byte for each weight in fp8, two for others, in each of a step's gathers; an evaluation's are all of two."""
    micro = 3
    run = a_run(shared, f"wire-{stage}", "fp8", {"zero": stage}, train__batch_size=2 * micro)
    for found in run_ranks(float8.one_step, 2, run, env=cpu_precision_env):
        times = 1 if stage == 1 else 2 * micro
        expected = times * (2 * found["parameters"] - found["fp8"])
        print(f"\nstage {stage}: {found['step']['all_gather']} for {expected}, {found['fp8']} in fp8")
        assert found["fp8"] > 0.5 * found["parameters"]
        assert found["step"]["all_gather"] == pytest.approx(expected, rel=0.002)
        whole = found["eval"]["all_gather"] / (2 * found["parameters"])
        assert whole == pytest.approx(round(whole), rel=0.002)
        scales = 2 * 4 * found["layers"]  # one all-reduce, which counts twice
        assert 0 <= found["step"]["all_reduce"] - scales <= 64


def test_where_it_is_and_where_it_is_not() -> None:
    def ways(**changes: Any) -> str:
        run = {"model": "m", "data": {"train": "x"}, "precision": "fp8", "parallel": {"zero": 3}}
        return float8_gathers(load_run(run, [f"{k.replace('__', '.')}={v}" for k, v in changes.items()]).run, 2)

    assert ways() == ways(advanced__fp8__gather="fp8") == "once"
    assert ways(offload__optimizer="cpu") == "by unit"
    assert not ways(advanced__fp8__gather="bf16") and not ways(fp8__recipe="rowwise") and not ways(precision="bf16")
    assert not ways(parallel__quantize_weights="true") and ways(parallel__context=2) == "once"
    assert not ways(offload__optimizer="cpu", offload__parameters="cpu")


def test_the_plan_says_so() -> None:
    from shardwise.config.schema import Parallel

    assert describe_collectives(Parallel(zero=3), 2, 2, "once") == "; gathers the weights of fp8 layers as fp8"
    assert "int8" in describe_collectives(Parallel(zero=3, quantize_weights=True), 2, 2, "once")
    assert describe_collectives(Parallel(zero=3), 1, 1, "once") == describe_collectives(Parallel(zero=3), 2, 2) == ""


def test_one_rank_has_nothing_to_gather() -> None:
    values = {"model": "m", "data": {"train": "x"}, "precision": "fp8", "advanced": {"fp8": {"gather": "fp8"}}}
    run = load_run(values | {"train": {"batch_size": 8}, "parallel": {"zero": 3}}).run
    check_parallel(run, 2)
    for ranks, alone in ((1, run), (2, load_run(values | {"parallel": {"zero": 3, "dp_shard_size": 1}}).run)):
        with pytest.raises(UserError, match="every rank has the weights whole") as told:
            check_parallel(alone, ranks)
        assert told.value.field == "advanced.fp8.gather"
