"""The trial before a run: what is right is remembered, what is not is refused by its axis and its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import config_of
from support.tiny import tokenizer_folder

from shardwise.config.schema import Model, Parallel
from shardwise.core.errors import UserError
from shardwise.nn.models.source import ModelSource, find_model
from shardwise.nn.tiny.case import LossAndGradients, judge
from shardwise.train.trial import check


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "cache_root", lambda: tmp_path / "cache")


def source_of(config: dict[str, Any], tmp_path: Path) -> ModelSource:
    return find_model(Model(config=config, tokenizer=tokenizer_folder(tmp_path / "tokenizer")))


def test_right_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, parallel, said = source_of(config_of("llama"), tmp_path), Parallel(tensor=4, pipeline=4), []
    check.check_axes(source, parallel, said.append)
    assert len(said) == 2 and "the same as in one process" in said[1], said
    monkeypatch.setattr(check, "_try", lambda *_: pytest.fail("it is remembered"))
    check.check_axes(source, parallel)
    with pytest.raises(pytest.fail.Exception):  # another axis is another question
        check.check_axes(source, Parallel(tensor=4))


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        check.check_axes(source_of(config_of("llama"), tmp_path), Parallel(expert=2))
    assert "parallel.expert = 2: llama cannot be divided so: has no experts" in str(error.value)


def test_what_is_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_try", lambda *_: {"outcome": "wrong", "why": "the gradient of norm.weight", "loss": 0})
    with pytest.raises(UserError, match=r"would train wrongly, the gradient of norm\.weight is off"):
        check.check_axes(source_of(config_of("llama"), tmp_path), Parallel(pipeline=2))


def test_a_missing_gradient_is_wrong() -> None:
    one, two = torch.ones(3), torch.tensor([1.0, 1.0, 1.01])
    assert judge(LossAndGradients(1.0, {"a": one}), LossAndGradients(1.0, {"a": one})).right
    assert judge(LossAndGradients(1.0, {}), LossAndGradients(1.0, {"a": one})).module == "a"
    verdict = judge(LossAndGradients(1.0, {"a": one, "b": two}), LossAndGradients(1.0, {"a": one, "b": one}))
    assert not verdict.right and verdict.module == "b"
    assert not judge(LossAndGradients(float("nan"), {}), LossAndGradients(1.0, {})).right
    assert not judge(LossAndGradients(1.0, {"a": one * float("nan")}), LossAndGradients(1.0, {"a": one})).right


def test_the_trial_has_two_ranks_along_each_axis() -> None:
    small, ranks = check.small_settings(
        Parallel(tensor=8, pipeline=4, zero=1, pipeline_schedule="interleaved", virtual_stages=4)
    )
    assert ranks == 4 and (small.tensor, small.pipeline, small.virtual_stages, small.zero) == (2, 2, 2, 1)
    assert check.small_settings(Parallel(expert=8))[1] == 2
