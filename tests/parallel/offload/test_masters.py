"""Weights kept once, in bf16, with the rest of their bits among the states: the same training as with fp32 masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import LLAMA, TIED, saved_model, tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.config.resolve import Machine, resolve_machine
from shardwise.core.errors import UserError
from shardwise.launch.trainer import Trainer


def trained(tmp: Path, name: str, **changes: Any) -> tuple[list[float], list[float]]:
    """Losses and norms of a run in bf16 on a CPU."""
    model = changes.pop("model", None) or {
        "config": changes.pop("config", LLAMA), "tokenizer": tokenizer_folder(tmp / "tokenizer"),
    }  # fmt: skip
    usual = {"precision": "bf16", "train__steps": 6, "train__batch_size": 4, "train__micro_batch_size": 4,
             "train__schedule": "constant"}  # fmt: skip
    rows = Trainer(tiny_run(tmp / name, model, **(usual | changes))).fit().metrics
    found = [row for row in rows if row["kind"] == "train"]
    return [row["loss"] for row in found], [row["grad_norm"] for row in found]


CASES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "accumulated": {"train__micro_batch_size": 1},
    "tied, recomputed": {"config": TIED, "recompute": "full"},
    "8 bits": {"train__optimizer": "adamw8bit"},
    "in backward": {"train__optimizer_in_backward": True, "train__max_grad_norm": None},
    "two ranks": {"ranks": 2, "train__micro_batch_size": 2},
    "two ranks, stage 3": {"ranks": 2, "parallel__zero": 3, "train__micro_batch_size": 1},
}
SLOW = ("tied, recomputed", "two ranks, stage 3", "in backward")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_the_same_as_fp32_masters(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    losses, norms = trained(tmp_path, "split", train__master_weights="split", **dict(case))
    plain, theirs = trained(tmp_path, "fp32", train__master_weights="fp32", **dict(case))
    print(name, [f"{a - b:+.1e}" for a, b in zip(losses, plain, strict=True)])
    assert losses == pytest.approx(plain, rel=2e-4) and norms == pytest.approx(theirs, rel=5e-3)
    assert losses[-1] < losses[0]


def test_adapters(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model", LLAMA)
    losses, _ = trained(tmp_path, "split", model=model, method="lora", train__master_weights="split")
    plain, _ = trained(tmp_path, "fp32", model=model, method="lora", train__master_weights="fp32")
    assert losses == pytest.approx(plain, rel=2e-4)


def test_going_on_the_other_way(tmp_path: Path) -> None:
    """A checkpoint of one kind is gone on from with the other, and with more ranks."""
    whole, _ = trained(tmp_path, "whole", train__master_weights="fp32")
    trained(tmp_path, "parts", train__master_weights="split", train__steps=3)
    first, _ = trained(
        tmp_path, "parts", train__master_weights="fp32", ranks=2, train__micro_batch_size=2, train__steps=5
    )
    last, _ = trained(tmp_path, "parts", train__master_weights="split")
    assert last == pytest.approx(whole, rel=2e-4) and len(first) == 5


def test_what_is_chosen() -> None:
    def answer(*overrides: str, gpus: int = 1) -> str:
        run = load_run({"model": "m", "data": {"train": "x"}, "train": {"batch_size": 8}}, overrides).run
        return resolve_machine(run, Machine(gpus, ranks=gpus)).run.train.master_weights

    assert answer() == "split" and answer(gpus=2) == answer("parallel.zero=3") == answer("device=cpu") == "fp32"
    assert answer("train.optimizer=muon") == answer("precision=fp16") == "fp32"
    assert answer("advanced.master_weights=fp32") == "fp32"
    assert answer("advanced.master_weights=split", gpus=2) == "split"
    assert answer("offload.optimizer=cpu", gpus=2) == "split"
    assert answer("offload.optimizer=cpu", "precision=fp32") == "fp32"
    with pytest.raises(UserError, match="whole matrices"):
        answer("advanced.master_weights=split", "train.optimizer=muon")
