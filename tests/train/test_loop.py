"""The loop around the steps: evaluation, records, checkpoints in time, and the ways a run can come to its end."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import PAIRS, tiny_run, tokenizer_folder

from shardwise.checkpoint.adapter_state import PREFIX
from shardwise.checkpoint.store import load_tensors
from shardwise.config.load import load_run
from shardwise.observe.metrics import read_metrics
from shardwise.optim.schedules import learning_rate
from shardwise.train import loop
from shardwise.train.meter import not_finite


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("loop")
    tokenizer_folder(tmp / "tokenizer")
    lines = PAIRS.read_text().splitlines(keepends=True)
    (tmp / "held-out.jsonl").write_text("".join(lines[:7]))
    return tmp


def checkpoints(output: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (output / "checkpoints").iterdir())


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "plain"])
def test_evaluation_equals_a_plain_computation(folder: Path, packing: bool) -> None:
    """Seven sequences in twos on three ranks: one rank gets a single one in the last round, two get none."""
    run = tiny_run(folder, data__packing=packing, data__eval=str(folder / "held-out.jsonl"), parallel__zero=3,
                   train__micro_batch_size=2, output=str(folder / f"evaluation-{packing}"))  # fmt: skip
    alone, plain, sequences = run_ranks(scenarios.evaluation, 1, run)[0]
    assert sequences == 7 or packing
    assert alone == pytest.approx(plain, abs=1e-6) and plain > 5
    together = run_ranks(scenarios.evaluation, 3, run)
    assert [loss for loss, _, _ in together] == [pytest.approx(alone, abs=1e-12)] * 3, "on every rank the same"


@pytest.mark.parametrize("zero", [1, 2])
def test_evaluation_does_not_disturb_training(folder: Path, zero: int) -> None:
    """After a forward without backward FSDP keeps parameters gathered at these stages; training must not notice."""
    ran = {}
    for every in (None, 2):
        output = folder / f"undisturbed-{zero}-{every}"
        run = tiny_run(folder, data__eval="10%", train__steps=6, train__micro_batch_size=3, train__eval_every=every,
                       parallel__zero=zero, output=str(output))  # fmt: skip
        ran[every] = run_ranks(scenarios.train, 2, run)[0]
        evaluated = [r["step"] for r in read_metrics(output / "metrics.jsonl") if r["kind"] == "eval"]
        assert evaluated == ([6] if every is None else [2, 4, 6])
    assert ran[None][0] == ran[2][0] and ran[None][1] == ran[2][1]
    assert all(torch.equal(ran[None][2][name], ran[2][2][name]) for name in ran[2][2])


def test_a_record_for_each_step(folder: Path) -> None:
    """Reports come every five steps and at the end; what they tell is each step's own."""
    results = {}
    for every in (1, 5):
        run = tiny_run(folder, train__steps=7, train__micro_batch_size=6, data__eval="10%", log__every=every,
                       train__warmup=2, output=str(folder / f"log-{every}"))  # fmt: skip
        run_ranks(scenarios.train, 1, run)
        results[every] = read_metrics(folder / f"log-{every}/metrics.jsonl")
    train = [r for r in results[5] if r["kind"] == "train"]
    assert [r["step"] for r in train] == [1, 2, 3, 4, 5, 6, 7]
    assert set(train[0]) == {
        "kind", "step", "loss", "learning_rate", "grad_norm", "sequences", "tokens", "supervised_tokens", "epoch",
        "tokens_per_second", "mfu", "memory_bytes", "elapsed_seconds", "eta_seconds",
    }  # fmt: skip
    same = ("step", "loss", "learning_rate", "grad_norm", "tokens", "supervised_tokens", "epoch")
    often = [r for r in results[1] if r["kind"] == "train"]
    assert [[r[key] for key in same] for r in train] == [[r[key] for key in same] for r in often]
    settings = load_run(run).run.train
    assert [r["learning_rate"] for r in train] == [learning_rate(settings, step, 7) for step in range(7)]
    assert all(0 < r["supervised_tokens"] < r["tokens"] <= 12 * 192 for r in train)
    epochs = [r["epoch"] for r in train]  # where each step leaves off
    assert epochs == sorted(epochs) and 0 < epochs[0] < 0.1
    assert train[-1]["eta_seconds"] == 0 and train[-1]["memory_bytes"] > 2**20 and train[-1]["tokens_per_second"] > 0
    assert [r["elapsed_seconds"] for r in train] == sorted(r["elapsed_seconds"] for r in train)
    (held_out,) = [r for r in results[5] if r["kind"] == "eval"]
    assert set(held_out) == {"kind", "step", "loss", "perplexity", "time"} and held_out["step"] == 7
    assert held_out["perplexity"] == pytest.approx(math.exp(held_out["loss"]))


def test_checkpoints_by_time(folder: Path) -> None:
    output = folder / "timed"
    run = tiny_run(folder, train__steps=40, train__micro_batch_size=6, checkpoint__every="250ms", checkpoint__keep=40,
                   output=str(output))  # fmt: skip
    run_ranks(scenarios.train, 1, run)
    seconds = {r["step"]: r["elapsed_seconds"] for r in read_metrics(output / "metrics.jsonl")}
    saved = checkpoints(output)
    assert len(saved) >= 2 and saved[-1] == 40, f"{seconds[40]} s, saved at {saved}"
    gaps = [seconds[b] - seconds[a] for a, b in itertools.pairwise(saved[:-1])]
    assert all(gap >= 0.2 for gap in gaps), f"a quarter of a second apart, but for the last: {gaps}"


def test_a_loss_that_is_no_number_ends_the_run(folder: Path) -> None:
    """Through the command. Reports are rare and checkpoints frequent, yet nothing is saved that has come to nothing."""
    output = folder / "diverged"
    run = tiny_run(folder, train__steps=30, train__learning_rate=1e30, log__every=30, checkpoint__every=1,
                   checkpoint__keep=30, train__micro_batch_size=6, ranks=2, output=str(output))  # fmt: skip
    code, out, err = cli.train(cli.write_run(folder / "diverged-run", run))
    assert code == 1 and "Traceback" not in out + err, err
    assert "became nan at step" in err and "lower train.learning_rate" in err and err.count("error:") == 1
    saved = checkpoints(output)
    assert saved and f"the same command goes on from step-{saved[-1]:08d}" in err
    last = read_metrics(output / "metrics.jsonl")[-1]
    assert last["step"] == saved[-1] + 1 and last["nonfinite"], "the step that came to nothing is on record"
    for step in saved:
        weight = torch.empty(515, 48)
        name = f"{PREFIX}model.embed_tokens.weight"
        load_tensors(output / f"checkpoints/step-{step:08d}", {name: weight}, None)
        assert weight.isfinite().all(), step


def test_a_gradient_that_is_no_number_ends_the_run() -> None:
    """The loss is still fine, but the weights after the step are not; where fp16 skips such steps they are."""
    good = {"step": 2, "loss": 2.5, "grad_norm": 1.0}
    bad = {"step": 3, "loss": 2.5, "grad_norm": math.inf}
    assert not_finite([good]) is None
    assert "gradient norm became inf at step 3 (loss 2.5)" in str(not_finite([good, bad]))
    assert not_finite([good, bad], steps_skipped=True) is None
    assert "loss became nan at step 3" in str(not_finite([good, bad | {"loss": math.nan}], steps_skipped=True))


def test_a_finished_run_is_left_as_it_is(folder: Path) -> None:
    """Through the command: says so, exits 0, trains nothing, and hands over the same model and figures."""
    output = folder / "finished"
    run = tiny_run(folder, train__steps=3, train__micro_batch_size=6, data__eval="10%", output=str(output))
    run_ranks(scenarios.train, 1, run)
    names = ("metrics.jsonl", "model/model.safetensors", "model/config.json", "checkpoints/step-00000003/manifest.json")
    before = {name: (output / name).read_bytes() for name in names}
    *_, last, held_out = read_metrics(output / "metrics.jsonl")
    code, out, err = cli.train(cli.write_run(folder / "finished-run", run))
    assert code == 0, err
    assert f"nothing is left to train: {output}/checkpoints/step-00000003 is at step 3, train.steps is 3" in out
    assert f"done: 3 steps, loss {last['loss']:.4f}, evaluation loss {held_out['loss']:.4f}" in out
    assert {name: (output / name).read_bytes() for name in names} == before


def test_finished_elsewhere(folder: Path) -> None:
    """The last checkpoint of one run handed to another, with another output folder: exported there, nothing trained."""
    a, b = folder / "elsewhere-a", folder / "elsewhere-b"
    run = tiny_run(folder, train__steps=2, train__micro_batch_size=6, output=str(a))
    _, _, trained = run_ranks(scenarios.train, 1, run)[0]
    moved = run | {"output": str(b), "resume": str(a / "checkpoints/step-00000002")}
    losses, _, parameters = run_ranks(scenarios.train, 1, moved)[0]
    assert losses == [] and checkpoints(b) == [2] and (b / "model/model.safetensors").is_file()
    assert all(torch.equal(parameters[name], trained[name]) for name in trained)
    assert json.loads((b / "result.json").read_text())["loss"] is None


def test_starting_afresh_in_a_used_folder(folder: Path) -> None:
    """The checkpoints that count are those of the run that is going on, not the later ones of the run given up."""
    output = folder / "afresh"
    run: dict[str, Any] = tiny_run(
        folder, train__steps=8, train__micro_batch_size=6, checkpoint__every=2, output=str(output)
    )
    run_ranks(scenarios.train, 1, run)
    assert checkpoints(output) == [6, 8]
    again = run | {"resume": "never", "train": run["train"] | {"steps": 4}}
    run_ranks(scenarios.train, 1, again)
    assert checkpoints(output) == [2, 4]
    assert sorted(cli.losses(output)) == [1, 2, 3, 4]


def test_the_loop_is_short() -> None:
    """One file that reads from top to bottom."""
    assert len(Path(loop.__file__).read_text().splitlines()) < 300
