"""Saving on a card: of the state at the save though training goes on at once, and hardly held up by it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import scenarios, writing
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder
from torch import nn

from shardwise.checkpoint.writing import StateWriter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def gigabytes() -> dict[str, torch.Tensor]:
    """2 GB in 64 tensors, a buffer and a counter on the host."""
    made: dict[str, torch.Tensor] = {}
    for n in range(32):
        made[f"model.{n}"] = nn.Parameter(torch.randn(1 << 23, device="cuda"))
        made[f"optimizer.{n}.exp_avg"] = torch.randn(1 << 23, device="cuda")
    return made | {"model.buffer": torch.randn(99, device="cuda"), "optimizer.0.step": torch.tensor(5.0)}


def test_what_is_saved_is_of_the_save(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """To the bit: the update is asked for at once, and a buffer and a counter change even before it."""
    given, writer = gigabytes(), StateWriter(group, durable=False, background=True)
    for turn in range(2):  # the second from memory that was kept
        before = {name: value.detach().clone() for name, value in given.items()}
        pending = writer.begin(given)
        assert pending.staged
        with torch.no_grad():
            given["model.buffer"].add_(1)
            given["optimizer.0.step"].add_(1)
            writer.settle()
            for value in given.values():
                value.mul_(0.5)
        pending.write(tmp_path / str(turn))
        found = {name: torch.zeros_like(value, device="cpu") for name, value in before.items()}
        dcp.load(found, checkpoint_id=tmp_path / str(turn))
        assert all(found[name].equal(before[name].cpu()) for name in before)


def test_the_call_does_not_wait_for_the_copy(group: dist.ProcessGroup) -> None:
    given, writer = gigabytes(), StateWriter(group, durable=False, background=True)
    writer.begin(given)  # takes the memory, plans
    writer._staging._copied.synchronize()
    held, whole = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        writer.begin(given)
        held.append(time.perf_counter() - begun)
        assert not writer._staging._copied.query(), "the copy is still under way"
        writer._staging._copied.synchronize()
        whole.append(time.perf_counter() - begun)
    size = sum(value.nbytes for value in given.values())
    print(f"\nheld {min(held) * 1e3:.1f} ms, copied in {min(whole) * 1e3:.1f} ms ({size / min(whole) / 1e9:.0f} GB/s)")
    assert min(held) < min(whole) / 4


WAYS: dict[str, dict[str, Any]] = {
    "fp32 masters": {"train__master_weights": "fp32"},
    "split masters": {"train__master_weights": "split"},
    "fp16": {"precision": "fp16"},
    "in backward": {
        "train__master_weights": "fp32",
        "train__optimizer_in_backward": True,
        "train__max_grad_norm": None,
    },
    "split, in backward": {
        "train__master_weights": "split",
        "train__optimizer_in_backward": True,
        "train__max_grad_norm": None,
    },
    "copies in memory": {"train__master_weights": "fp32", "checkpoint__every": 2, "checkpoint__memory": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_goes_on_exactly(way: str, tmp_path: Path) -> None:
    """Saved after every step, with copies that come late: the run is an undisturbed one, and so is what resumes it."""
    tokenizer_folder(tmp_path / "tokenizer")
    common: dict[str, Any] = {"train__steps": 6, "precision": "bf16", "device": "cuda", "backend": "gloo"}
    common |= {"parallel__zero": 2, "checkpoint__keep": 9} | WAYS[way]
    saves = {"checkpoint__every": 1} | WAYS[way]
    plain = {key: value for key, value in common.items() if key not in ("checkpoint__every", "checkpoint__memory")}
    undisturbed = run_ranks(scenarios.train, 1, tiny_run(tmp_path, **plain, output=str(tmp_path / "plain")))[0]
    run = tiny_run(tmp_path, **(common | saves), output=str(tmp_path / "saving"))
    saving = run_ranks(writing.train_with_late_copies, 1, run)[0]
    assert saving[0] == undisturbed[0]
    for step in (2, 4):
        folder = str(tmp_path / f"saving/checkpoints/step-{step:08d}")
        moved = tiny_run(tmp_path, **plain, output=str(tmp_path / f"from-{step}"), resume=folder)
        resumed = run_ranks(scenarios.train, 1, moved)[0]
        assert resumed[0] == undisturbed[0][step:]
        assert all(torch.equal(resumed[2][name], undisturbed[2][name]) for name in resumed[2])


@pytest.mark.parametrize("way", ["fp32 masters", "in backward"])
def test_it_is_the_waiting_that_does_it(way: str, tmp_path: Path) -> None:
    """Without it the same late copies are of later states: so the tests above would see it."""
    tokenizer_folder(tmp_path / "tokenizer")
    common: dict[str, Any] = {"train__steps": 4, "precision": "bf16", "device": "cuda", "backend": "gloo"} | WAYS[way]
    run = tiny_run(tmp_path, **common, checkpoint__every=2, checkpoint__keep=9, output=str(tmp_path / "saving"))
    saving = run_ranks(writing.train_with_late_copies, 1, run, False)[0]
    folder = str(tmp_path / "saving/checkpoints/step-00000002")
    moved = tiny_run(tmp_path, **common, output=str(tmp_path / "on"), resume=folder)
    assert run_ranks(scenarios.train, 1, moved)[0][0] != saving[0][2:]
