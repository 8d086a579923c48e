"""lm-eval on a task file and data of one's own, without a network; and without lm-eval."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.evaluation import QUESTIONS, no_bar, write_lines

from shardwise.core.errors import UserError
from shardwise.evaluate.choices import measure_choices
from shardwise.evaluate.harness import measure_harness
from shardwise.evaluate.settings import ChoiceTask, HarnessTask


def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"shardwise\[eval\]"):
        measure_harness(HarnessTask(tasks=("arc",)), None, None, lambda _: None)


@pytest.mark.slow  # lm-eval looks over the whole machine to note its versions
@pytest.mark.timeout(900)
def test_it_agrees_with_our_own_scores(loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    answers = [1, 0, 2, 0]
    rows = [{"q": r["question"], "choices": r["choices"], "gold": a} for r, a in zip(QUESTIONS, answers, strict=True)]
    data = write_lines(tmp_path / "data.jsonl", rows)
    task = {
        "task": "tiny_choice", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "Question: {{q}}\nAnswer:",
        "doc_to_choice": "{{choices}}", "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(yaml.safe_dump(task))
    kept: list[dict[str, Any]] = []
    (found,) = measure_harness(HarnessTask(tasks=("tiny_choice",), folder=str(folder)), *loaded, kept.append)
    theirs = {f.name: f for f in found.figures}
    ours = measure_choices(
        ChoiceTask(path=write_lines(tmp_path / "q.jsonl", QUESTIONS)), *loaded, no_bar, lambda _: None
    )
    figures = {f.name: f.value for f in ours.figures}
    assert theirs["acc"].value == figures["accuracy (raw)"] and theirs["acc_norm"].value == figures["accuracy"]
    assert theirs["acc"].count == 4 and theirs["acc"].more_is_better and len(kept) == 4
    with pytest.raises(UserError, match="no such task"):
        measure_harness(HarnessTask(tasks=("tiny_chioce",), folder=str(folder)), *loaded, kept.append)
