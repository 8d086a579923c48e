"""Runs that train apart: real commands, real processes, a real meeting point."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import cli, scenarios
from support.meeting import meeting_point, meetings, worker_run
from support.ranks import run_ranks
from support.tiny import tiny_run


def model_of(output: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(output / "model" / "model.safetensors"))


def train_all(runs: Iterable[dict[str, Any]], ranks: int = 1) -> None:
    """Every worker at once, each with ranks of its own, to the end."""
    runs = list(runs)
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(lambda run: run_ranks(scenarios.train, ranks, run), runs))


def test_one_worker_is_ordinary_training(tmp_path: Path) -> None:
    """Rate 1 without momentum: the mean of one difference leads where the worker went."""
    plain = tiny_run(tmp_path, output=str(tmp_path / "plain"), train__steps=6, train__batch_size=4)
    with meeting_point(tmp_path / "meet", "--method", "fedavg") as point:
        train_all([plain, worker_run(tmp_path, point, "one", 2, train__steps=6, train__batch_size=4)])
    ours, theirs = model_of(tmp_path / "one"), model_of(tmp_path / "plain")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-6, atol=1e-7)
    assert cli.losses(tmp_path / "one") == pytest.approx(cli.losses(tmp_path / "plain"), rel=1e-6)
    met = meetings(tmp_path / "one")
    assert [m["round"] for m in met] == [1, 2, 3] and all(m["workers"] == ["one"] for m in met)
    assert all(m["distance"] == 0 and m["mean_norm"] == m["own_norm"] > 0 for m in met)


def test_sgd_that_meets_at_every_step_is_synchronous_training(tmp_path: Path) -> None:
    """Two workers with a row each, weighted by their tokens, against one run whose steps have both rows."""
    texts = {"a": "The quick brown fox jumps over the lazy dog. " * 2, "b": "Pack my box with five dozen jugs."}
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "both.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.values()))
    same: dict[str, Any] = dict(
        train__steps=5, train__optimizer="sgd", train__betas=[0.0, 0.9], train__clip=None, train__weight_decay=0.0,
        train__learning_rate=0.05, train__schedule="constant", data__packing=False,
    )  # fmt: skip
    with meeting_point(tmp_path / "meet", "--method", "fedavg", "--least", "2") as point:
        runs = {
            name: worker_run(
                tmp_path, point, name, 1, train__batch_size=1, data__train=str(tmp_path / f"{name}.jsonl"), **same
            )
            for name in texts
        }
        both = tiny_run(tmp_path, output=str(tmp_path / "both"), train__batch_size=2,
                        data__train=str(tmp_path / "both.jsonl"), **same)  # fmt: skip
        train_all([*runs.values(), both])
    synchronous, moved = model_of(tmp_path / "both"), 0.0
    for name in texts:
        for key, tensor in model_of(tmp_path / name).items():
            torch.testing.assert_close(tensor, synchronous[key], rtol=1e-5, atol=1e-6)
    for record in meetings(tmp_path / "a"):
        moved += record["mean_norm"]
        assert record["distance"] > 0 and record["workers"] == ["a", "b"]
    assert moved > 0.05
