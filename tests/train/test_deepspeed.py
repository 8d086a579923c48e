"""The example with every key trains as it is, and the command says what became of each key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.optim.schedules import learning_rate

EXAMPLE = Path(__file__).parents[2] / "examples/deepspeed/ds_config_zero3.json"


def keys(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


def test_the_example_trains_with_no_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, by the command: the account has every key, the rates are DeepSpeed's, the CSV files are there."""
    tokenizer_folder(tmp_path / "tokenizer")
    run = tiny_run(tmp_path, ranks=2, train__steps=10, train__batch_size=4, train__warmup=4)
    del run["train"]["max_grad_norm"], run["precision"]
    file = cli.write_run(tmp_path, run)
    monkeypatch.chdir(tmp_path)  # the example writes its CSV files below the folder it is run in
    code, out, err = cli.train(file, f"parallel.deepspeed={EXAMPLE}", env={"COLUMNS": "250"})
    assert code == 0, err
    for key in keys(json.loads(EXAMPLE.read_text())):
        assert f" {key}: " in out or f"\n{key}: " in out, f"{key} is missing in what was printed"
    assert "auto → precision: auto (our default) → " in out  # bf16 or fp32, as this CPU is
    assert "auto → the steps of the run → 10" in out

    loaded = load_run(file, [f"parallel.deepspeed={EXAMPLE}"]).run
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "train"]
    assert [row["learning_rate"] for row in rows] == [learning_rate(loaded.train, step, 10) for step in range(10)]
    assert rows[1]["learning_rate"] == 0 and rows[5]["learning_rate"] == pytest.approx(3e-3)
    table = (tmp_path / "out/deepspeed/csv/train_loss.csv").read_text().splitlines()
    assert table[0] == "step,loss" and [float(line.split(",")[1]) for line in table[1:]] == [r["loss"] for r in rows]
    assert len({row["loss"] for row in rows}) > 5


def test_a_run_that_overflows_at_the_least_scale_ends(tmp_path: Path) -> None:
    """fp16's gradients are too large at every scale allowed: each step is skipped, and the run says why it ends."""
    tokenizer_folder(tmp_path / "tokenizer")
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_batch_size": 2,
                "fp16": {"enabled": True, "initial_scale_power": 40, "min_loss_scale": 2**39, "hysteresis": 1},
            }
        )
    )
    run = tiny_run(tmp_path, train__steps=6, parallel__deepspeed=str(tmp_path / "ds.json"))
    del run["precision"], run["train"]["batch_size"], run["train"]["micro_batch_size"]
    with pytest.raises(Exception, match="even at the least loss scale"):
        run_ranks(scenarios.train, 1, run)
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["skipped"] for row in rows)
    assert all(math.isfinite(row["loss"]) for row in rows)
