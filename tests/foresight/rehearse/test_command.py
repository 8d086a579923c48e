"""`shardwise rehearse`: mistakes on its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.core.errors import UserError


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--rank", "4"], "there are 4 ranks"), (["--rank", "-1"], "there are 4 ranks"),
     (["--documents", "0"], "cannot be divided"), (["--documents", "100"], "cannot be divided")],
)  # fmt: skip
def test_what_there_is_not(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{model: llama-3.1-8b, data: {train: x, sequence_length: 1024}}")
    shown = CliRunner().invoke(app, ["rehearse", str(tmp_path / "run.yaml"), "--gpus", "4", *words])
    assert isinstance(shown.exception, UserError) and said in str(shown.exception)


@pytest.mark.parametrize("place", ["cpu", pytest.param("disk", marks=pytest.mark.slow)])
def test_everything_off_the_device_and_accumulated(place: str, tmp_path: Path) -> None:
    """Sums of gradients that live elsewhere are added up there, which on the host wanted a GPU's stream."""
    sizes = "hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, vocab_size: 512"
    model = f"{{config: {{model_type: llama, {sizes}}}, tokenizer: x}}"
    run = tmp_path / "run.yaml"
    run.write_text(
        f"{{model: {model}, data: {{train: x, sequence_length: 64}}, objective: causal, precision: bf16,"
        f" train: {{batch_size: 4, micro_batch_size: 1}}, parallel: {{zero: 3}}, output: {tmp_path},"
        f" offload: {{optimizer: {place}, parameters: {place}}}}}"
    )
    shown = CliRunner().invoke(app, ["rehearse", str(run), "--gpus", "2", "--json"])
    assert shown.exception is None, shown.output
    [told] = json.loads(shown.stdout)["rehearsed"]
    assert told["micro_batches"] == 2 and told["held"]["parameters"] < 16 * 1024, "stubs of 512 bytes"
