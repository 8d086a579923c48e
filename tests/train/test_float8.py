"""Runs in 8 bits on a CPU, whose arithmetic is the GPU's: they learn as in 16, at every stage, and evaluate in 16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.families import config_of
from support.tiny import LLAMA, tiny_run, tokenizer_folder
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.config.load import load_run
from shardwise.config.resolve import Machine, resolve_machine
from shardwise.core.errors import UserError
from shardwise.launch.trainer import Trainer

WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128}


def losses(tmp: Path, name: str, **changes: Any) -> list[float]:
    model = {"config": changes.pop("config", WIDE), "tokenizer": tokenizer_folder(tmp / "tokenizer")}
    usual = {"train__steps": 12, "train__batch_size": 8, "train__micro_batch_size": 2, "precision": "bf16", "ranks": 2}
    result = Trainer(tiny_run(tmp / name, model, **(usual | changes))).fit()
    return [row["loss"] for row in result.metrics if row["kind"] == "train"]


def test_it_learns_as_in_16_bits(tmp_path: Path) -> None:
    plain = losses(tmp_path, "bf16")
    for recipe in ("tensorwise", "rowwise"):
        found = losses(tmp_path, recipe, fp8__recipe=recipe, fp8__min_features=16)
        print(recipe, [f"{a - b:+.4f}" for a, b in zip(found, plain, strict=True)])
        assert found != plain and found == pytest.approx(plain, rel=0.02)


def test_stages_and_recomputation_change_nothing_else(tmp_path: Path) -> None:
    plain = losses(tmp_path, "plain", fp8__recipe="tensorwise", fp8__min_features=16, parallel__zero=0)
    for stage in (2, 3):
        found = losses(tmp_path, str(stage), fp8__recipe="tensorwise", fp8__min_features=16, parallel__zero=stage,
                       recompute="full")  # fmt: skip
        assert found == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral"])
def test_families(family: str, tmp_path: Path) -> None:
    plain = losses(tmp_path, "bf16", config=config_of(family))
    found = losses(tmp_path, "fp8", config=config_of(family), fp8__recipe="tensorwise", fp8__min_features=16)
    assert found != plain and found == pytest.approx(plain, rel=0.03)


def test_short_for_bf16_with_fp8() -> None:
    run = load_run(
        {"model": "m", "data": {"train": "x"}, "precision": "fp8", "fp8": {"modules_to_not_convert": "down_proj"}}
    ).run
    assert (
        run.precision == "bf16" and run.fp8.recipe == "tensorwise" and run.fp8.modules_to_not_convert == ("down_proj",)
    )
    run = load_run({"model": "m", "data": {"train": "x"}, "fp8": "rowwise"}, ["precision=fp8"]).run
    assert run.fp8.recipe == "rowwise"


def test_a_gpu_without_it_is_told() -> None:
    run = load_run({"model": "m", "data": {"train": "x"}, "precision": "fp8"}).run
    with pytest.raises(UserError, match="does not multiply in 8 bits"):
        resolve_machine(run, Machine(8, fp8=False, ranks=8))
    assert resolve_machine(run, Machine(8, ranks=8)).run.precision == "bf16"
    shown = CliRunner().invoke(app, ["plan", "llama-3.1-8b", "--gpu", "a100", "--gpus", "8", "precision=fp8"])
    assert shown.exit_code != 0 and "8 bits" in str(shown.exception)
