"""`shardwise plan` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.config.load import load_run
from shardwise.core.errors import UserError


def test_a_plan_for_programs_and_the_run_that_does_it(tmp_path: Path) -> None:
    target = tmp_path / "run.yaml"
    shown = CliRunner().invoke(
        app, ["plan", "smollm2-135m", "data.sequence_length=512", "--gpu", "rtx-4090", "--gpus", "2", "--tokens", "10M",
              "--json", "--write", str(target)]
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    best = told["strategies"][0]
    assert told["model"]["parameters"] == pytest.approx(134.5e6, rel=0.01) and told["cluster"]["ranks"] == 2
    assert best["fits"] and 0 < best["mfu"] < 1 and best["cost"] > 0 and told["reasons"]
    run = load_run(target).run
    assert run.model.name == "HuggingFaceTB/SmolLM2-135M" and run.data.sequence_length == 512
    assert run.parallel.zero == best["settings"]["parallel.zero"]
    assert run.train.micro_batch_size == best["settings"]["train.micro_batch_size"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nope"], "no name of the catalogue"),
        (["llama-3.1-8b", "--gpu", "h1000"], "did you mean h100"),
        (["llama-3.1-8b", "--gpus", "4"], "--gpu h100"),
        (["llama-3.1-8b", "--gpu", "h100", "--gpus", "0"], "at least one"),
        (["llama-3.1-8b", "--gpu", "h100", "--method", "lorra"], "use lora"),
        (["llama-3.1-8b", "--gpu", "h100", "--tokens", "-5B"], "500M"),
        (["llama-3.1-8b", "--gpu", "h100", "--price", "nan"], "above 0"),
        (["llama-3.1-8b", "--gpu", "h100", "--write", "/nowhere/run.yaml"], "folder is not there"),
        (["gpt2", "--gpu", "h100", "data.sequence_length=4096"], "use 1024 or less"),
        (["smollm2-135m", "--gpu", "h100", "--gpus", "8", "train.batch_size=7"], "multiple of 8"),
        ([], "is needed"),
    ],
)
def test_mistakes_are_told_before_anything_is_rehearsed(words: list[str], told: str) -> None:
    shown = CliRunner().invoke(app, ["plan", *words])
    assert isinstance(shown.exception, UserError) and told in str(shown.exception)


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("mine")
    shown = CliRunner().invoke(app, ["plan", "gpt2", "--gpu", "h100", "--write", str(tmp_path / "run.yaml")])
    assert isinstance(shown.exception, UserError) and (tmp_path / "run.yaml").read_text() == "mine"
