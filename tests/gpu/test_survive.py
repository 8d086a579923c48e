"""Runs on a GPU that lose a rank, stall, or have a slow one: two ranks share the card through gloo."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cli, faults
from support.tiny import tokenizer_folder
from survive.test_runs import a_run, copied, left_in_memory, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CARD: dict[str, Any] = {"device": "cuda", "backend": "gloo", "precision": "bf16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("gpu-survive")
    tokenizer_folder(tmp / "tokenizer")
    return tmp


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    file, output = a_run(folder, "undisturbed", **CARD)
    code, _, err = cli.train(file)
    assert code == 0, err
    return output


def test_a_killed_rank_goes_on_from_memory(folder: Path, undisturbed: Path) -> None:
    file, output = a_run(folder, "copied", **CARD, checkpoint={"every": 15, "memory": 2})
    process = cli.start(file)
    copied(process, output, 3)
    cli.kill_rank(process, 1)
    code, out, err = cli.finish(process)
    assert code == 0, err
    assert re.search(r"starting again from the copy of step (\d+) in memory \(1 of 3\)", err), err
    assert "going on from the copy of step" in out
    assert same(output, undisturbed) and not left_in_memory(output)


def test_a_stalled_rank_is_named(folder: Path, undisturbed: Path) -> None:
    file, output = a_run(folder, "stalled", **CARD, timeout="6s")
    code, _, err = cli.train(file, env=faults.environment(folder / "sleeps", "sleep", 1, 6))
    assert code == 0, err
    assert "rank 1 kept the others waiting for 6 s (timeout) at step 6" in err and "rank 0 waits in" in err
    assert same(output, undisturbed)


def test_a_slow_rank_is_named(folder: Path) -> None:
    """It naps in every step; the host of the other runs ahead, and its collectives are timed by events."""
    file, output = a_run(folder, "slow", **CARD, train__steps=120, checkpoint__every=None, compile=False)
    code, _, err = cli.train(file, env=faults.environment(folder / "naps", "slow", 1, 1))
    assert code == 0, err
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [one["rank"] for one in records if one["kind"] == "slow"] == [1]
