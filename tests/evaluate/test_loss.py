"""`shardwise eval` of losses: equal to the evaluation during training, to the last digits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.encoders import encoder_run
from support.evaluation import no_bar
from support.tiny import PAIRS, tiny_run

from shardwise.core.errors import UserError
from shardwise.evaluate.command import evaluate, run_of
from shardwise.evaluate.loss import measure_loss
from shardwise.evaluate.settings import LossTask
from shardwise.export.inference import load_for_inference
from shardwise.launch.trainer import Trainer

HELD_OUT = PAIRS.parent / "heldout.jsonl"


def _halves(tmp: Path) -> list[dict[str, Any]]:
    lines = HELD_OUT.read_text().splitlines(keepends=True)
    for name, part in (("a", lines[: len(lines) // 2]), ("b", lines[len(lines) // 2 :])):
        (tmp / f"{name}.jsonl").write_text("".join(part))
    return [{"path": str(tmp / "a.jsonl"), "name": "a"}, {"path": str(tmp / "b.jsonl"), "name": "b"}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run with two eval sources, and its last evaluation."""
    tmp = tmp_path_factory.mktemp("trained")
    run = tiny_run(tmp, train__steps=3, train__micro_batch_size=2, ranks=1, data__eval=_halves(tmp))
    result = Trainer(run).fit()
    return Path(run["output"]), next(r for r in reversed(result.metrics) if r["kind"] == "eval")


@pytest.mark.parametrize("where", ["", "model", "checkpoints/step-00000003"])
def test_equals_the_evaluation_of_training(where: str, trained: Any) -> None:
    output, told = trained
    name = str(output / where) if where else str(output)
    model, tokenizer = load_for_inference(name)
    measured = measure_loss(LossTask(), name, model, tokenizer, run_of(name), no_bar)
    figures = {f.name: f for f in measured.figures}
    assert figures["loss"].value == pytest.approx(told["loss"], rel=1e-7)
    assert figures["perplexity"].value == pytest.approx(told["perplexity"], rel=1e-6)
    assert {n: g.value for n, g in measured.groups.items()} == pytest.approx(told["losses"], rel=1e-7)
    assert {n: g.units.sum() for n, g in measured.groups.items()} == told["supervised_by_source"]  # type: ignore[union-attr]
    assert figures["loss"].error is not None and 0 < figures["loss"].error < 1


def test_a_share_that_was_held_out(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, train__steps=1, ranks=1, data__eval="20%", parallel__zero=3)
    result = Trainer(run).fit()
    model, tokenizer = load_for_inference(run["output"])
    measured = measure_loss(LossTask(), "it", model, tokenizer, run_of(run["output"]), no_bar)
    assert measured.figures[0].value == pytest.approx(result.eval_loss, rel=1e-7)


def test_data_of_ones_own_and_two_models(trained: Any, llama: str, capsys: Any, tmp_path: Path) -> None:
    output, _ = trained
    evaluate([llama, str(output)], [LossTask.model_validate({"data": str(HELD_OUT)})], tmp_path / "out", True)
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((tmp_path / "out/results.json").read_text())
    values = [told["results"][m][0]["figures"]["loss"]["value"] for m in (llama, str(output))]
    gap = told["differences"][str(output)]["loss"]["loss"]
    assert gap["value"] == pytest.approx(values[1] - values[0]) and gap["paired"] and gap["value"] < 0
    assert gap["stderr"] < told["results"][llama][0]["figures"]["loss"]["stderr"] * 5


def test_the_run_of_another_model_is_borrowed(trained: Any, llama: str, capsys: Any) -> None:
    output, told = trained
    evaluate([llama, str(output)], [], None, False)
    shown = capsys.readouterr().out
    assert f"{told['loss']:.4f}" in shown and "difference to the first model" in shown


def test_nothing_to_measure(llama: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run made this model"):
        evaluate([llama], [], None, False)
    run = tiny_run(tmp_path, train__steps=1, ranks=1)
    Trainer(run).fit()
    with pytest.raises(UserError, match="held nothing out"):
        evaluate([run["output"]], [], None, False)
    with pytest.raises(UserError, match="no such"):
        evaluate([llama], [LossTask.model_validate({"data": str(tmp_path / "gone.jsonl")})], None, False)


@pytest.mark.parametrize(("name", "objective"), [("bert", "classify"), ("bert", "masked"), ("t5", "seq2seq")])
def test_models_that_do_not_write_texts(name: str, objective: str, tmp_path: Path) -> None:
    """Their loss and figures are those of the run's last evaluation; a classifier's classes are its head's."""
    run = encoder_run(tmp_path, name, objective, train__steps=1, ranks=1, data__eval="20%")
    told = next(r for r in reversed(Trainer(run).fit().metrics) if r["kind"] == "eval")
    model, tokenizer = load_for_inference(run["output"], talks=False)
    measured = measure_loss(LossTask(), "it", model, tokenizer, run_of(run["output"]), no_bar)
    figures = {f.name: f.value for f in measured.figures}
    assert figures == pytest.approx({key: told[key] for key in figures}, rel=1e-6)
    assert ("accuracy" in figures) == (name == "bert")
    # of a model that no run made, the head alone says which classes there are
    again = measure_loss(LossTask.model_validate({"data": run["data"]["train"]}), "it", model, tokenizer, None, no_bar)
    assert again.figures[0].value > 0
