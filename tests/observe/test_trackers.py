"""Trackers are fed in the background: a slow one costs nothing, a failing one is told once, no secret is quoted.

TensorBoard, W&B (offline), MLflow (a database in the folder) and Trackio are the real ones where they are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.watched import eval_record, train_record

from shardwise.config.load import load_run
from shardwise.config.resolve import check_trackers
from shardwise.core.errors import UserError
from shardwise.core.redact import redact
from shardwise.observe import trackers
from shardwise.observe.trackers import Trackers, figures_of, openers_of

RECORDS = [train_record(1, mfu=None), train_record(2, breakdown={"whole": 0.2, "forward": 0.1}), eval_record(2)]


def needs(name: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


class Kept:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []
        self.settings: dict[str, Any] = {}
        self.closed = False

    def __call__(self, output: Path, settings: dict[str, Any], step: int) -> Kept:
        self.settings = settings
        return self

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.told.append((step, figures))

    def close(self) -> None:
        self.closed = True


def test_every_record_in_order(tmp_path: Path) -> None:
    kept = Kept()
    all_ = Trackers({"kept": kept}, tmp_path, {"train": {"learning_rate": 1e-3}, "x": None}, 0)
    for record in RECORDS:
        all_.put(record)
    all_.close()
    assert [step for step, _ in kept.told] == [1, 2, 2] and kept.closed and all_.troubles() == []
    assert kept.settings == {"train.learning_rate": "0.001", "x": "None"}
    figures = kept.told[1][1]
    assert figures["train/seconds/forward"] == 0.1 and figures["train/loss/web"] == RECORDS[1]["losses"]["web"]
    assert kept.told[2][1]["eval/perplexity"] == 12.2 and not {"train/mfu", "train/step"} & set(kept.told[0][1])
    assert figures_of({"kind": "train", "step": 1, "loss": float("nan"), "skipped": True}) == {}


def test_a_slow_one_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "LAST_SECONDS", 0.05)
    monkeypatch.setattr(trackers, "MOST_WAITING", 50)
    hold = threading.Event()

    class Slow(Kept):
        def log(self, step: int, figures: dict[str, float]) -> None:
            hold.wait(60)
            super().log(step, figures)

    slow = Slow()
    all_ = Trackers({"slow": slow}, tmp_path, {}, 0)
    began = time.perf_counter()
    for step in range(1, 501):
        all_.put(train_record(step))
    all_.close()
    assert time.perf_counter() - began < 30 and "in time" in all_.troubles()[0] and all_.troubles() == []
    hold.set()


@pytest.mark.parametrize("where", ["open", "log", "close"])
def test_a_failing_one_is_told_once_and_dropped(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sesame-open-123")

    class Broken(Kept):
        def fail(self, at: str) -> None:
            if at == where:
                raise SystemExit("no login with sesame-open-123\nand more")

        def __call__(self, *_: Any) -> Broken:
            self.fail("open")
            return self

        def log(self, *_: Any) -> None:
            self.fail("log")

        def close(self) -> None:
            self.fail("close")

    kept = Kept()
    all_ = Trackers({"broken": Broken(), "kept": kept}, tmp_path, {"secret": "sesame-open-123"}, 0)
    for record in RECORDS:
        all_.put(record)
    all_.close()
    (words,) = all_.troubles()
    assert "broken failed" in words and "SystemExit: no login with (hidden)" in words and "sesame" not in words
    assert all_.troubles() == [] and len(kept.told) == 3 and "sesame" not in str(kept.settings)


def test_secrets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("MONKEY_SIZE", "12")
    assert redact("key 0123456789abcdef of 12") == "key (hidden) of 12"


def test_a_missing_package_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run({"model": "x", "data": {"train": "x.jsonl"}, "log": {"trackers": "wandb"}}).run
    assert run.log.trackers == ("wandb",)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(UserError, match=r'pip install "shardwise\[wandb\]"'):
        check_trackers(run.log.trackers)
    with pytest.raises(UserError, match=r"log\.trackers"):
        load_run({"model": "x", "data": {"train": "x.jsonl"}, "log": {"trackers": ["comet"]}})


def feed(name: str, output: Path) -> None:
    output.mkdir()
    all_ = Trackers(openers_of([name]), output, {"train": {"learning_rate": 1e-3, "note": "a|b"}}, 0)
    for record in RECORDS:
        all_.put(record)
    all_.close()
    assert all_.troubles() == []


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    feed("tensorboard", tmp_path / "out")
    read = EventAccumulator(str(tmp_path / "out/tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [
        (r["step"], pytest.approx(r["loss"])) for r in RECORDS[:2]
    ]
    assert {"eval/loss", "eval/loss/web", "train/seconds/forward"} <= set(read.Tags()["scalars"])


@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(trackers, "LAST_SECONDS", 120.0)
    feed("mlflow", tmp_path / "out")
    client = MlflowClient(f"sqlite:///{tmp_path}/out/mlflow.db")
    experiment = client.get_experiment_by_name("shardwise")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["train.learning_rate"] == "0.001" and run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2]


@needs("wandb")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(trackers, "LAST_SECONDS", 120.0)
    feed("wandb", tmp_path / "out")
    known = json.loads((tmp_path / "out/trackers.json").read_text())["wandb"]
    (folder,) = (tmp_path / "out/wandb").glob("offline-run-*")
    deadline = time.monotonic() + 20  # its own process writes the file
    while not any(file.stat().st_size > 500 for file in folder.glob("*.wandb")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert folder.name.endswith(known) and any(file.stat().st_size > 500 for file in folder.glob("*.wandb"))


@needs("trackio")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(trackers, "LAST_SECONDS", 120.0)
    feed("trackio", tmp_path / "out")
    assert os.listdir(tmp_path / "trackio")
