"""The same from Python: a run as a dict, a path or a Run; what comes back; and what is left behind."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch
from support import cli
from support.tiny import tiny_run

import shardwise
from shardwise.core.errors import UserError
from shardwise.train.result import Result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library")


def test_fit_returns_where_the_model_lies(folder: Path) -> None:
    """Two ranks, started from here; the handlers of the caller's signals are given back."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tiny_run(folder, train__steps=3, train__micro_batch_size=6, data__eval="10%", ranks=2, parallel__zero=3)
    said: list[str] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    result = shardwise.Trainer(run).fit(said.append)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert isinstance(result, Result) and result.step == 3 and result.model == folder / "out/model"
    assert [(r["kind"], r["step"]) for r in result.metrics] == [("train", 1), ("train", 2), ("train", 3), ("eval", 3)]
    assert result.loss == result.metrics[2]["loss"] and result.eval_loss == result.metrics[3]["loss"]
    model, tokenizer = (kind.from_pretrained(result.model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    with torch.no_grad():
        logits = model(**tokenizer("ZeRO shards the", return_tensors="pt")).logits
    assert logits.isfinite().all() and logits.shape[-1] == 515
    assert "finding the model" in said


def test_overrides_and_threads(folder: Path) -> None:
    """Overrides as on the command line, from a thread that is not the main one, as in a notebook's server."""
    output = folder / "second"
    results: list[Result] = []
    file = cli.write_run(folder, tiny_run(folder, train__steps=50, train__micro_batch_size=6))
    overrides = ("train.steps=2", f"output={output}", "train.learning_rate=1e-4")
    thread = threading.Thread(target=lambda: results.append(shardwise.Trainer(file, *overrides).fit()))
    thread.start()
    thread.join()
    (result,) = results
    assert result.step == 2 and result.model == output / "model" and result.metrics[0]["learning_rate"] == 1e-4
    assert result.eval_loss is None


def test_preparing_writes_nothing(folder: Path) -> None:
    """`prepare` answers every question and starts no process."""
    trainer = shardwise.Trainer(shardwise.load_run(tiny_run(folder)).run, f"output={folder / 'third'}", "ranks=2")
    job = trainer.prepare()
    assert (
        job.ranks == 2 and job.run.backend == "gloo" and job.parameters > 10_000 and job.data.total("documents") > 100
    )
    assert trainer.prepare() is job
    assert not (folder / "third").exists()


def test_mistakes_are_exceptions(folder: Path) -> None:
    with pytest.raises(UserError, match=r"train\.batch_size(.|\n)*cannot be divided among 5 ranks"):
        shardwise.Trainer(tiny_run(folder), "ranks=5").fit()
    with pytest.raises(UserError, match="did you mean train"):
        shardwise.Trainer(tiny_run(folder) | {"trian": {}})
