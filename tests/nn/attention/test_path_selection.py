"""Which attention and which rows a run gets: the fastest that compute what the model's definition says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import LLAMA, tiny_run, tokenizer_folder
from transformers import CONFIG_MAPPING

from shardwise.config.load import load_run
from shardwise.config.objectives import Task
from shardwise.core.errors import UserError
from shardwise.foresight.prepare import prepare_run
from shardwise.nn.attention import path_selection
from shardwise.nn.attention import varlen as attention
from shardwise.nn.attention.path_selection import path_for
from shardwise.nn.models.source import ModelSource
from shardwise.resolved_run import ResolvedRun

# Its layers carry a state from one document of a packed row into the next.
RECURRENT = LLAMA | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}


def source(kind: str, task: Task = "causal", **settings: Any) -> ModelSource:
    return ModelSource(kind, CONFIG_MAPPING[kind](**settings), None, "", task=task)


@pytest.fixture(autouse=True)
def _nothing_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(path_selection, "cache_root", lambda: tmp_path)


@pytest.mark.parametrize(
    ("kind", "packed"),
    [("llama", True), ("gemma2", True), ("gpt_oss", True), ("lfm2", False), ("roberta", False)],
)
def test_rows_are_packed_where_documents_stay_apart(kind: str, packed: bool) -> None:
    found = path_for(source(kind, **RECURRENT if kind == "lfm2" else {}), "packed")
    assert bool(found.trouble) is not packed and (found.implementation, found.untried) == ("sdpa", "")


def test_sdpa_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' own does for Gemma 2: no softcap."""
    assert path_for(source("gemma2"), "padded").implementation == "sdpa"
    plain = attention.Scores
    monkeypatch.setattr(attention, "Scores", lambda scale, _, *more: plain(scale, None, *more))
    monkeypatch.setattr(path_selection, "FORMAT", 0)
    found = path_for(source("gemma2"), "padded")
    assert found.implementation == "eager" and "gradient of model.layers" in found.slower


def test_a_model_that_cannot_be_tried_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_selection, "by_definition", lambda *_: 1 / 0)
    found = path_for(source("llama"), "packed")
    assert found.untried == "ZeroDivisionError: division by zero" and found.implementation == ""


def test_outcomes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first = path_for(source("llama"), "padded")
    monkeypatch.setattr(path_selection, "_try_paths", lambda *_: pytest.fail("tried again"))
    assert path_for(source("llama"), "padded") == first


def prepared(tmp: Path, config: dict[str, Any], *overrides: str) -> tuple[ResolvedRun, list[str]]:
    said: list[str] = []
    run = tiny_run(tmp, {"config": config, "tokenizer": tokenizer_folder(tmp / "tokenizer")})
    return prepare_run(load_run(run, overrides), said.append), said


def test_packing_is_answered_with_no_and_the_reason(tmp_path: Path) -> None:
    job, _ = prepared(tmp_path, RECURRENT)
    assert job.run.data.packing is False
    assert "lfm2 computes something else for a document in a packed row" in job.reasons["data.packing"]
    with pytest.raises(UserError, match="computes something else for a document in a packed row than alone"):
        prepared(tmp_path, RECURRENT, "data.packing=true")


def test_packing_is_answered_with_yes(tmp_path: Path) -> None:
    job, said = prepared(tmp_path, LLAMA)
    assert job.run.data.packing is True and not [line for line in said if "attention" in line]
    assert "data.packing" not in job.reasons


def test_a_slower_path_is_reported(tmp_path: Path) -> None:
    """GPT-Neo does not scale its scores, which SDPA does."""
    sizes = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    job, said = prepared(tmp_path, {"model_type": "gpt_neo", "vocab_size": 515} | sizes)
    assert job.source.attention == "eager"
    assert any("attention: eager, which is slower" in line for line in said)


def test_blocks_whose_forward_is_called_directly_are_named() -> None:
    """SqueezeBERT's encoder calls `layer.forward(…)`: FSDP would gather nothing."""
    assert path_for(source("squeezebert", "masked"), "padded").bypassed.endswith("layers.0")
    assert not path_for(source("bert", "masked"), "padded").bypassed
