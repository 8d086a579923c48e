"""Rules for generated answers, and a task of them end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.evaluation import no_bar, write_lines

from shardwise.core.errors import UserError
from shardwise.evaluate import generation
from shardwise.evaluate.generation import measure_generation
from shardwise.evaluate.scorers import Scorer, last_number
from shardwise.evaluate.settings import GenerateTask
from shardwise.nn.generate import Sampling, answers


@pytest.mark.parametrize(
    ("settings", "output", "wanted", "right"),
    [
        ({}, " Paris. ", ["paris"], True),
        ({}, "It is Paris", ["Paris"], False),
        ({}, "two  words", ["x", "Two words!"], True),
        ({"scorer": "contains"}, "It is Paris, of course", ["paris"], True),
        ({"scorer": "contains"}, "It is Rome", ["paris"], False),
        ({"scorer": "numeric"}, "So 3 + 4 makes $1,007.00.", ["1007"], True),
        ({"scorer": "numeric"}, "between 6 and 8", ["7"], False),
        ({"scorer": "numeric"}, "none", ["7"], False),
        ({"scorer": "numeric"}, "-0.5", ["-.5"], True),
        ({"scorer": "json"}, '{"a": [1, 2]}', [], True),
        ({"scorer": "json"}, '{"a": NaN}', [], False),
        ({"scorer": "json"}, 'Here: {"a": 1}', [], False),
        ({"scorer": "json", "keys": ("a", "b")}, '{"a": 1}', [], False),
        ({"scorer": "json", "keys": ("a",)}, "[1]", [], False),
        ({"scorer": "json", "extract": r"(?s)```json\s*(.*?)```"}, 'See:\n```json\n{"a": 1}\n```', [], True),
        ({"scorer": "regex", "pattern": r"^\d{4}$"}, "1984", [], True),
        ({"scorer": "regex"}, "in 1984", [r"\b19\d\d\b"], True),
        ({"scorer": "regex"}, "in 2084", [r"\b19\d\d\b"], False),
        ({"extract": r"#### (.*)"}, "2 + 2\n#### 5\n#### 4", ["4"], True),
        ({"extract": r"#### (.*)"}, "4", ["4"], False),
    ],
)
def test_rules(settings: dict[str, Any], output: str, wanted: list[str], right: bool) -> None:
    assert Scorer(GenerateTask(path="x", **settings))(output, wanted) is right


def test_patterns_that_are_wrong() -> None:
    with pytest.raises(UserError, match="no valid pattern"):
        Scorer(GenerateTask(path="x", scorer="regex", pattern="("))
    slow = Scorer(GenerateTask(path="x", scorer="regex", pattern=r"(a|aa)+$"))
    with pytest.raises(UserError, match="too long"):
        slow("a" * 60 + "b", [])


def test_numbers() -> None:
    assert last_number("1e3") == 1000 and last_number("1,234,567") == 1234567 and last_number("v. ,") is None


def test_a_task(loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    monkeypatch.setitem(generation.BATCH, "cpu", 2)
    prompts = ["Say it.", "What is a rank, and what is a shard of it?", "Why?"]
    said = answers(model, tokenizer, prompts, Sampling(max_tokens=6))
    turns = [{"role": "user", "content": prompts[2]}, {"role": "assistant", "content": said[2]}]
    rows: list[dict[str, Any]] = [
        {"question": prompts[0], "answer": ["no", said[0]], "category": "x"},
        {"prompt": prompts[1], "answer": "something else"},
        {"messages": turns},  # as in training data: the last turn is wanted
    ]
    kept: list[dict[str, Any]] = []
    task = GenerateTask(path=write_lines(tmp_path / "p.jsonl", rows), max_tokens=6)
    measured = measure_generation(task, model, tokenizer, no_bar, kept.append)
    assert list(measured.figures[0].sums) == [1.0, 0.0, 1.0] and measured.groups["x"].value == 1.0  # type: ignore[arg-type]
    assert {k["output"] for k in kept} == set(said) and len(kept) == 3
    with pytest.raises(UserError, match="no answer"):
        rows[1].pop("answer")
        task = GenerateTask(path=write_lines(tmp_path / "q.jsonl", rows))
        measure_generation(task, model, tokenizer, no_bar, kept.append)
