"""`shardwise rehearse`: mistakes on its command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.errors import UserError


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--rank", "4"], "there are 4 ranks"), (["--rank", "-1"], "there are 4 ranks"),
     (["--documents", "0"], "cannot be divided"), (["--documents", "100"], "cannot be divided")],
)  # fmt: skip
def test_what_there_is_not(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{model: llama-3.1-8b, data: {train: x, sequence_length: 1024}}")
    shown = CliRunner().invoke(app, ["rehearse", str(tmp_path / "run.yaml"), "--gpus", "4", *words])
    assert isinstance(shown.exception, UserError) and said in str(shown.exception)
