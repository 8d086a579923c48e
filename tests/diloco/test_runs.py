"""Runs that train apart: real commands, real processes, a real meeting point."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import cli, scenarios
from support.meeting import meeting_point, meetings, worker_run
from support.ranks import run_ranks
from support.tiny import LLAMA, PAIRS, saved_model, tiny_run

from shardwise.diloco.worker import OuterSync


def model_of(output: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(output / "model" / "model.safetensors"))


def train_all(runs: Iterable[dict[str, Any]], ranks: int = 1, env: dict[str, str] | None = None) -> None:
    """Every worker at once, each with ranks of its own, to the end."""
    runs = list(runs)
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(lambda run: run_ranks(scenarios.train, ranks, run, env=env), runs))


def test_one_worker_is_ordinary_training(tmp_path: Path) -> None:
    """Rate 1 without momentum: the mean of one difference leads where the worker went."""
    plain = tiny_run(tmp_path, output=str(tmp_path / "plain"), train__steps=6, train__batch_size=4)
    with meeting_point(tmp_path / "meet", "--method", "fedavg") as point:
        train_all([plain, worker_run(tmp_path, point, "one", 2, train__steps=6, train__batch_size=4)])
        with pytest.raises(Exception, match=r"is at round 3, where a run of 6 steps has ended(.|\n)*--state"):
            train_all([worker_run(tmp_path, point, "anew", 2, train__steps=6, train__batch_size=4)])
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
        train__steps=5, train__optimizer="sgd", train__betas=[0.0, 0.9], train__max_grad_norm=None,
        train__weight_decay=0.0,
        train__learning_rate=0.05, train__schedule="constant", data__packing=False,
    )  # fmt: skip
    with meeting_point(tmp_path / "meet", "--method", "fedavg", "--min-workers", "2") as point:
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


ROWS = [json.loads(line) for line in PAIRS.read_text().splitlines()]


def quarter(folder: Path, index: int, of: int = 2) -> str:
    """A worker's own rows: nobody else has them."""
    file = folder / f"rows-{index}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[index::of]))
    return str(file)


STATES_AWAY = {"offload__optimizer": "cpu", "precision": "bf16"}
PLACES = {
    "zero3-int8": ({"parallel__zero": 3}, "int8"),
    "hybrid": ({"parallel__zero": 2, "parallel__dp_shard_size": 1}, "fp32"),
    "masters": ({"parallel__zero": 2, **STATES_AWAY}, "bf16"),
    "shelf-int4": ({"parallel__zero": 3, "offload__parameters": "cpu", **STATES_AWAY}, "int4"),
}


@pytest.mark.parametrize("settings, dtype", PLACES.values(), ids=PLACES)
def test_ranks_and_places(tmp_path: Path, settings: dict[str, Any], dtype: str, cpu_precision_env: Any) -> None:
    """Two workers of two ranks each end with the same model, however it is divided and stored."""
    with meeting_point(tmp_path / "meet", "--dtype", dtype, "--min-workers", "2") as point:
        common: dict[str, Any] = {"train__steps": 5, "train__batch_size": 4, **settings}
        train_all([
            worker_run(tmp_path, point, name, 2, data__train=quarter(tmp_path, index), **common)
            for index, name in enumerate(("x", "y"))
        ], 2, cpu_precision_env)  # fmt: skip
        rounds = point.rounds()
    assert [r["workers"] for r in rounds] == [["x", "y"]] * 3  # the last one early, at the last step
    ours, theirs = model_of(tmp_path / "x"), model_of(tmp_path / "y")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    state = load_file(tmp_path / "meet" / "round-00000003" / "global-00000")["values"]
    flat = torch.cat([ours[name].flatten().float() for name in sorted(ours)])
    torch.testing.assert_close(flat, state, rtol=2e-7, atol=0)  # of masters in two halves a tie loses the last bit
    first = meetings(tmp_path / "x")[0]
    assert first["distance"] > 0 and first["bytes_sent"] > 0
    if dtype == "int8":
        assert first["bytes_sent"] < 1.1 * state.numel() and first["bytes_received"] < 1.1 * state.numel()
        # Four such workers that meet every 50 steps, against the fp32 gradients of four ranks at each step.
        assert 50 * 2 * 3 * 4 * state.numel() > 100 * 4 * (first["bytes_sent"] + first["bytes_received"])


def test_only_adapters_travel(tmp_path: Path) -> None:
    saved_model(tmp_path / "base", LLAMA)
    with meeting_point(tmp_path / "meet", "--min-workers", "2") as point:
        common: dict[str, Any] = {"train__steps": 4, "train__batch_size": 4, "method": {"type": "lora", "rank": 4}}
        runs = [
            worker_run(
                tmp_path, point, name, 2, model=str(tmp_path / "base"), data__train=quarter(tmp_path, i), **common
            )
            for i, name in enumerate(("x", "y"))
        ]
        train_all(runs)
        state = json.loads((tmp_path / "meet" / "state.json").read_text())
        saved_model(tmp_path / "other", LLAMA, seed=1)
        with pytest.raises(AssertionError, match="another base model than the others"):
            train_all([runs[0] | {"model": str(tmp_path / "other"), "output": str(tmp_path / "z")}])
    assert all("lora" in name for name, _ in state["tensors"])
    ours, theirs = (load_file(tmp_path / n / "model" / "adapter_model.safetensors") for n in ("x", "y"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_workers_with_unlike_data_count_by_their_tokens(tmp_path: Path) -> None:
    """FedAvg over unlike data: the mean is weighted by what each learned from, and both sides say so."""
    short = [row for row in ROWS if len(json.dumps(row)) < 400][:20]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    texts = "".join(json.dumps({"text": row["messages"][-1]["content"] * 3}) + "\n" for row in ROWS)
    (tmp_path / "texts.jsonl").write_text(texts)
    with meeting_point(tmp_path / "meet", "--method", "fedavg", "--min-workers", "2") as point:
        train_all([
            worker_run(tmp_path, point, name, 2, train__steps=4, train__batch_size=size, data__packing=name == "texts",
                       data__train=str(tmp_path / f"{name}.jsonl"))
            for name, size in (("short", 2), ("texts", 4))
        ])  # fmt: skip
        rounds = point.rounds()
    few, many = meetings(tmp_path / "short"), meetings(tmp_path / "texts")
    for record, small, large in zip(rounds, few, many, strict=True):
        assert large["tokens"] > 3 * small["tokens"] > 0
        share = small["tokens"] / (small["tokens"] + large["tokens"])
        assert record["weights"] == pytest.approx([share, 1 - share])
        assert small["distance"] > large["distance"]  # the mean is nearer to who has more


def test_a_long_wait_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    alone = OuterSync.__new__(OuterSync)
    alone._world = SimpleNamespace(is_main=True, size=1, control=None)  # type: ignore[assignment]
    monkeypatch.setattr("shardwise.diloco.worker.SILENCE", 0.2)

    def work(seconds: float) -> dict[str, float]:
        time.sleep(seconds)
        return {"slept": seconds}

    assert alone._run_on_main(lambda: work(1.7), lambda: told.append("waiting")) == {"slept": 1.7} and told == [
        "waiting"
    ]
    monkeypatch.setattr("shardwise.diloco.worker.SILENCE", 60.0)
    assert alone._run_on_main(lambda: work(0.0), lambda: told.append("again")) == {"slept": 0.0} and told == ["waiting"]
