"""The trial before a run: what is right is remembered, what is not is refused by its axis and its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import config_of
from support.tiny import tokenizer_folder

from shardwise.config.load import load_run
from shardwise.config.schema import Model, Run
from shardwise.core.errors import UserError
from shardwise.nn.models.source import ModelSource, find_model
from shardwise.nn.tiny.case import LossAndGradients, judge
from shardwise.train.trial import check
from shardwise.train.trial.ranks import failure_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "cache_root", lambda: tmp_path / "cache")


def source_of(config: dict[str, Any], tmp_path: Path) -> ModelSource:
    return find_model(Model(config=config, tokenizer=tokenizer_folder(tmp_path / "tokenizer")))


def run_with(**settings: Any) -> Run:
    """A run of two rows with these settings of `parallel` and, after `run_`, of its own."""
    own = {name.removeprefix("run_"): value for name, value in settings.items() if name.startswith("run_")}
    parallel = {name: value for name, value in settings.items() if not name.startswith("run_")}
    given = {"model": "none", "data": {"train": "none"}, "parallel": parallel, "precision": "fp32"}
    return load_run(given | own).run


def test_right_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, run, said = source_of(config_of("llama"), tmp_path), run_with(tensor=4, pipeline=4), []
    check.check_axes(source, run, said.append)
    assert len(said) == 2 and "the same as in one process" in said[1], said
    monkeypatch.setattr(check, "_try", lambda *_: pytest.fail("it is remembered"))
    check.check_axes(source, run)
    with pytest.raises(pytest.fail.Exception):  # another axis is another question
        check.check_axes(source, run_with(tensor=4))


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        check.check_axes(source_of(config_of("llama"), tmp_path), run_with(expert=2))
    assert "parallel.expert = 2: llama cannot be divided so: has no experts" in str(error.value)


def test_what_is_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_try", lambda *_: {"outcome": "wrong", "why": "the gradient of norm.weight", "loss": 0})
    with pytest.raises(UserError, match=r"would train wrongly, the gradient of norm\.weight is off"):
        check.check_axes(source_of(config_of("llama"), tmp_path), run_with(pipeline=2))


def test_a_missing_gradient_is_wrong() -> None:
    one, two = torch.ones(3), torch.tensor([1.0, 1.0, 1.01])
    assert judge(LossAndGradients(1.0, {"a": one}), LossAndGradients(1.0, {"a": one})).right
    assert judge(LossAndGradients(1.0, {}), LossAndGradients(1.0, {"a": one})).module == "a"
    verdict = judge(LossAndGradients(1.0, {"a": one, "b": two}), LossAndGradients(1.0, {"a": one, "b": one}))
    assert not verdict.right and verdict.module == "b"
    assert not judge(LossAndGradients(float("nan"), {}), LossAndGradients(1.0, {})).right
    assert not judge(LossAndGradients(1.0, {"a": one * float("nan")}), LossAndGradients(1.0, {"a": one})).right


def test_the_cause_is_told_not_its_echo() -> None:
    right = {"outcome": "pass"}
    lost = {"outcome": "refused", "why": "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"}
    cause = {"outcome": "refused", "why": "ValueError: no heads"}
    assert failure_of([lost, right, cause]) is cause and failure_of([right, right]) is None
    assert failure_of([{"outcome": "wrong", "why": "the gradient of process group"}, cause])["outcome"] == "wrong"
    for crashed in ([lost, None], [right, None], [lost, lost]):
        assert failure_of(crashed)["outcome"] == "silent"


def test_the_trial_has_two_ranks_along_each_axis() -> None:
    small, ranks = check.small_run(
        run_with(tensor=8, pipeline=4, zero=1, pipeline_schedule="interleaved", virtual_stages=4)
    )
    parallel = small.parallel
    assert ranks == 4 and (parallel.tensor, parallel.pipeline, parallel.virtual_stages, parallel.zero) == (2, 2, 2, 1)
    assert check.small_run(run_with(expert=8))[1] == 2


def test_the_trial_assembles_what_the_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters and recomputation are in it; what one process computes has the adapters too."""
    said: list[str] = []
    run = run_with(tensor=2, run_method="lora", run_recompute="full")
    check.check_axes(source_of(config_of("llama"), tmp_path), run, said.append)
    assert "the same as in one process" in said[1], said
    small, _ = check.small_run(run_with(tensor=2, run_method={"type": "qlora"}, run_recompute="full"))
    assert small.method.type == "lora" and small.recompute == "full"
