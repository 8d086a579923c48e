"""The gate before training: what will not fit is refused with remedies that do; and predictions are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.families import config_of
from support.tiny import LLAMA, rows_of_pairs, saved_model, tiny_run, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.config.resolve import resolve_machine
from shardwise.core.errors import UserError
from shardwise.core.hardware.specs import Cluster, cluster_of
from shardwise.foresight.plan import auto, gate, needs_prediction
from shardwise.foresight.rehearse.ledger import WORKSPACE
from shardwise.launch import trainer
from shardwise.launch.trainer import Trainer
from shardwise.observe import calibration
from shardwise.observe import prediction as kept
from shardwise.observe.calibration import Record

DEEP = LLAMA | {"num_hidden_layers": 6, "vocab_size": 515}


def limited(monkeypatch: pytest.MonkeyPatch, memory: float) -> None:
    """A GPU with so much memory stands in for the CPU."""

    def here(run: Any, ranks: int) -> Cluster:
        cluster = cluster_of("h100", 1, ranks)
        return replace(cluster, device=replace(cluster.device, memory=int(memory)))

    monkeypatch.setattr(trainer, "worth_predicting", lambda *_: True)
    monkeypatch.setattr(gate, "cluster_here", here)
    monkeypatch.setattr(auto, "cluster_here", here)


def a_run(tmp: Path, **changes: Any) -> dict[str, Any]:
    model = {"config": DEEP, "tokenizer": tokenizer_folder(tmp / "tokenizer")}
    usual = {"train__steps": 2, "train__batch_size": 16, "train__micro_batch_size": 8}
    return tiny_run(tmp, model, **(usual | changes))


def prepared(run: dict[str, Any], *overrides: str, force: bool = False) -> tuple[Trainer, list[str]]:
    said: list[str] = []
    made = Trainer(run, *overrides, force=force)
    made.prepare(said.append)
    return made, said


def needs(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> float:
    limited(monkeypatch, 1e12)
    made, said = prepared(run)
    assert made.prediction is not None and any(line.startswith("foreseen: ") for line in said)
    return made.prediction.estimate.peak


# Family, what is unusual, and the share of what it needs that there is.
TOO_LARGE: dict[str, tuple[str, float, dict[str, Any]]] = {
    "full": ("llama", 0.8, {}),
    "one sequence": ("llama", 0.8, {"train__micro_batch_size": 1}),
    "gpt2": ("gpt2", 0.7, {}),
    "lora": ("llama", 0.6, {"method": "lora"}),
    "two replicas": ("llama", 0.7, {"ranks": 2, "parallel__zero": 0, "train__micro_batch_size": 1}),
    "tensor": ("llama", 0.7, {"ranks": 2, "parallel__tensor": 2}),
    "plain loss": ("qwen3", 0.7, {"loss": "plain", "train__micro_batch_size": 4}),
    "masked": ("bert", 0.6, {"objective": "masked", "data__packing": False, "data__over_length": "truncate"}),
    "experts": ("mixtral", 0.8, {}),
    "recomputed": ("llama", 0.8, {"recompute": "full"}),
}


@pytest.mark.parametrize("name", ["full", *(pytest.param(n, marks=pytest.mark.slow) for n in TOO_LARGE if n != "full")])
def test_what_does_not_fit_is_refused_and_its_first_remedy_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, share, changes = TOO_LARGE[name]
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    config = config_of(family) | ({"n_layer": 6, "n_embd": 256} if family == "gpt2" else wide)
    if changes.get("objective") == "masked":
        rows_of_pairs(tmp_path)
        changes = changes | {"data__train": str(tmp_path / "texts.jsonl")}
    run = a_run(tmp_path, **({"model__config": config} | changes))
    if changes.get("method") == "lora":
        run["model"] = saved_model(tmp_path / "model", config)
    peak = needs(run, monkeypatch)
    limited(monkeypatch, WORKSPACE + share * (peak - WORKSPACE))
    with pytest.raises(UserError, match="will not fit") as refused:
        prepared(run)
    assert "--force" in refused.value.remedy
    print(f"\n{name}: {refused.value}")
    first = refused.value.remedy.splitlines()[0]
    settings, _, price = first.partition(": ")
    assert "saves" in price and ("time per step" in price or "no slower" in price)
    made, _ = prepared(run, *settings.split())
    assert made.prediction is not None and made.prediction.estimate.fits
    assert made.fit().step == 2
    assert json.loads((tmp_path / "out" / kept.FILE).read_text())["fits"]


def test_on_a_cpu_only_large_runs_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = resolve_machine(load_run(a_run(tmp_path, objective="causal")).run).run
    assert not needs_prediction.worth_predicting(run, 1, 10**6, 0)
    monkeypatch.setattr(needs_prediction, "usable_memory", lambda: 10**7)
    assert needs_prediction.worth_predicting(run, 1, 10**6, 0)
    assert prepared(a_run(tmp_path))[0].prediction is None


def test_force_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 1.05 * WORKSPACE)
    _, said = prepared(a_run(tmp_path), force=True)
    assert any("--force" in line for line in said)


def test_a_micro_batch_that_was_left_open_is_made_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path)
    peak = needs(run, monkeypatch)
    limited(monkeypatch, WORKSPACE + 0.8 * (peak - WORKSPACE))
    made, _ = prepared(run, "train.micro_batch_size=auto")
    job = made.prepare()
    assert int(job.run.train.micro_batch_size) < 8 and "fits" in job.reasons["train.micro_batch_size"]


def test_auto_is_answered_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path)
    peak = needs(run, monkeypatch)
    limited(monkeypatch, WORKSPACE + 0.6 * (peak - WORKSPACE))
    open_run = {k: v for k, v in run.items() if k != "parallel"} | {"parallel": "auto", "recompute": "auto"}
    job = prepared(open_run, "train.micro_batch_size=auto")[0].prepare()
    assert not job.run.parallel.auto and job.run.recompute in ("none", "full")
    assert "per step" in job.reasons["parallel"]
    same = prepared(open_run, "train.micro_batch_size=8", "parallel={zero: 2}")[0].prepare()
    assert same.run.recompute == "full" and same.run.train.micro_batch_size == 8  # nothing else fits


def test_auto_beside_settings_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensor is given too"):
        load_run(a_run(tmp_path) | {"parallel": {"auto": True, "tensor": 2}})


def test_a_rehearsal_asks_for_answers(tmp_path: Path) -> None:
    from shardwise.foresight.rehearse.target import aim

    with pytest.raises(UserError, match="shardwise plan"):
        aim(load_run(a_run(tmp_path) | {"parallel": "auto"}), 1, 8)


def test_predictions_are_kept_and_correct_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_file", lambda: tmp_path / "foresight.jsonl")
    assert calibration.correction("h100").runs == 0
    for measured in (1.04, 1.05, 1.06):
        calibration.add(Record("h100", "m", 1e9, measured * 1e9, 1.0, 1.2))
    calibration.add(Record("a100", "m", 1e9, 9e9, 1.0, 9.0))
    (tmp_path / "foresight.jsonl").open("a").write("not a record\n")
    found = calibration.correction("h100")
    assert found.runs == 3 and found.memory == pytest.approx(1.05) and found.time == pytest.approx(1.2)
    assert calibration.correction("a100").memory == 1.0  # too few
    output = tmp_path / "run"
    output.mkdir()
    made = {"device": "h100", "peak": 1e9, "step_seconds": 1.0, "foreseen_bytes": 1e9, "foreseen_seconds": 1.0}
    (output / kept.FILE).write_text(json.dumps(made))
    told = kept.compare(output, "m", 1.25e9, 0.5)
    assert told is not None and "-20.0%" in told and "+100%" in told
    assert len(calibration.records("h100")) == 4
    steps = [{"kind": "train", "step": n, "elapsed_seconds": n * 0.5, "memory_bytes": 1.25e9} for n in range(1, 4)]
    (output / kept.FILE).write_text(json.dumps(made | {"kind": "cuda"}))
    assert kept.beside_prediction(output, "m", steps, 8) == told
    few = {"kind": "train", "step": 4, "elapsed_seconds": 1.6, "memory_bytes": 1.25e9, "sequences": 1}
    assert kept.beside_prediction(output, "m", [*steps, few], 8) == told, "a smaller batch takes less time"
    assert kept.beside_prediction(output, "m", [few | {"step": 3, "elapsed_seconds": 1.5}, few], 8) is None
    (output / kept.FILE).write_text(json.dumps(made | {"kind": "cpu"}))
    assert all(kept.beside_prediction(folder, "m", steps, 8) is None for folder in (output, tmp_path))


def test_a_shortage_is_laid_out(tmp_path: Path) -> None:
    made = {"memory": {"parameters": 2**30, "optimizer": 2**31, "activations": 2**32}, "limit": 2**33,
            "foreseen_bytes": 7 * 2**30}  # fmt: skip
    (tmp_path / kept.FILE).write_text(json.dumps(made))
    told = kept.explain_shortage(tmp_path, {"parameters": 2**30, "optimizer": 2**31}, 8 * 2**30)
    assert told is not None and "states: 3.0 GiB, foreseen 3.0 GiB" in told and "5.0 GiB, foreseen 4.0 GiB" in told
    assert kept.explain_shortage(tmp_path / "other", {}, 0) is None
