"""Early stopping, the best checkpoint by any figure, and which one is exported."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.tiny import tiny_run

from shardwise.config.load import load_run
from shardwise.config.resolve import resolve_machine
from shardwise.core.errors import UserError
from shardwise.launch.trainer import Trainer
from shardwise.train.describe import print_result
from shardwise.train.early_stopping import EarlyStopping, better, figure_of
from shardwise.train.state import Position


def _watch(position: Position, root: Path, **train: Any) -> EarlyStopping:
    run = tiny_run(root, data__eval="10%", train__eval_every=1, **train)
    return EarlyStopping(load_run(run).run, position, root, ["a.b", "c"], ("accuracy",))


def test_figures_of_a_record() -> None:
    record = {"loss": 2.0, "perplexity": 7.4, "accuracy": 0.5, "losses": {"a.b": 1.0}}
    assert figure_of(record, "eval_loss") == figure_of(record, "loss") == 2.0
    assert figure_of(record, "losses.a.b") == 1.0
    assert figure_of(record, "accuracy") == 0.5


@pytest.mark.parametrize(
    ("value", "best", "more", "least", "answer"),
    [
        (1.0, None, False, 0.0, True),
        (0.9, 1.0, False, 0.0, True),
        (1.0, 1.0, False, 0.0, False),
        (0.95, 1.0, False, 0.1, False),
        (0.6, 0.5, True, 0.0, True),
        (0.4, 0.5, True, 0.0, False),
        (float("nan"), None, False, 0.0, False),
    ],
)
def test_better(value: float, best: float | None, more: bool, least: float, answer: bool) -> None:
    assert better(value, best, more, least) is answer


def test_counts_and_survives_a_checkpoint(tmp_path: Path) -> None:
    stop = {"metric": "accuracy", "patience": 2, "min_delta": 0.05}
    position = Position()
    watch = _watch(position, tmp_path, train__early_stopping=stop, checkpoint__best="losses.a.b")
    seen = []
    for step, (accuracy, loss) in enumerate([(0.5, 3.0), (0.54, 2.0)], 1):  # 0.54: less than min_delta above
        position.step = step
        seen.append(watch.evaluated({"loss": 9.0, "accuracy": accuracy, "losses": {"a.b": loss}}))
        (tmp_path / f"step-{step:08d}").mkdir()
    assert seen == [True, True] and position.waiting == 1 and position.best_step == 2
    saved = json.loads(json.dumps(position.to_json("x")))
    saved.pop("data_fingerprint")
    again = Position(**saved)
    watch = _watch(again, tmp_path, train__early_stopping=stop, checkpoint__best="losses.a.b")
    assert not watch.enough and again.best_value == 2.0
    again.step = 3
    assert not watch.evaluated({"loss": 9.0, "accuracy": 0.5, "losses": {"a.b": 2.5}})
    assert "accuracy has not improved for 2 evaluations (best 0.5)" in watch.enough
    other = _watch(again, tmp_path, train__early_stopping={"metric": "eval_loss", "patience": 2})
    assert not other.enough and again.best_step is None  # other figures: what was counted means nothing


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such figure") as caught:
        _watch(Position(), tmp_path, train__early_stopping={"metric": "losses.d"})
    assert "losses.a.b" in str(caught.value)
    with pytest.raises(UserError, match="mode: min or mode: max"):
        _watch(Position(), tmp_path, checkpoint__best="brightness")
    for change, field in (
        ({"train__early_stopping": {}}, "train.early_stopping"),
        ({"checkpoint__best": "accuracy"}, "checkpoint.best"),
        ({"export__checkpoint": "best"}, "export.checkpoint"),
    ):
        with pytest.raises(UserError, match="nothing is evaluated") as caught:
            resolve_machine(load_run(tiny_run(tmp_path, **change)).run)
        assert caught.value.field == field
    with pytest.raises(UserError, match="at its end only"):
        resolve_machine(load_run(tiny_run(tmp_path, data__eval="10%", train__early_stopping={})).run)


def test_a_run_that_no_longer_improves_stops_resumes_and_exports_its_best(tmp_path: Path) -> None:
    run = tiny_run(
        tmp_path, ranks=2, data__eval="10%", train__eval_every=1,
        train__early_stopping={"patience": 2, "min_delta": 100},
        checkpoint__keep=1, checkpoint__best={"metric": "perplexity", "mode": "max"}, export__checkpoint="best",
    )  # fmt: skip
    result = Trainer(run).fit()
    out = Path(run["output"])
    summary = json.loads((out / "result.json").read_text())
    evals = [r["loss"] for r in result.metrics if r["kind"] == "eval"]
    assert result.step == 3 and evals == sorted(evals, reverse=True)
    assert summary["ended"].startswith("stopped early: eval_loss") and summary["exported"] == "step-00000001"
    folders = sorted(p.name for p in (out / "checkpoints").iterdir() if not p.name.startswith("."))
    assert folders == ["step-00000001", "step-00000003"]
    told = Console(file=io.StringIO(), width=200)
    print_result(result, Trainer(run).prepare(), told)
    assert "of step-00000001, the best by perplexity" in told.file.getvalue()  # type: ignore[attr-defined]

    shutil.rmtree(out / "model")
    run["ranks"] = 1
    again = Trainer(run).fit()  # nothing is left to do but the export
    assert again.step == 3 and (out / "model" / "config.json").is_file()
    further = Trainer(run, "train.early_stopping.patience=3").fit()
    assert further.step == 4  # the evaluations before the resume were counted
