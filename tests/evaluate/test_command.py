"""Settings, options, results on disk, and Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.evaluation import QUESTIONS, write_lines
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.core.errors import Interrupted, UserError
from shardwise.evaluate import command
from shardwise.evaluate.settings import ChoiceTask, GenerateTask, JudgeTask, read_tasks


def _run(*words: str) -> Any:
    return CliRunner().invoke(app, ["eval", *words])


def _tasks(tmp_path: Path, text: str) -> list[Any]:
    file = tmp_path / "eval.yaml"
    file.write_text(text)
    return read_tasks(file)


def test_a_file_of_tasks(tmp_path: Path) -> None:
    text = """
tasks:
  - {type: loss, data: [a.jsonl, {path: b.jsonl, name: b}]}
  - {type: choice, path: q.csv, score: letter, shots: 5, examples: dev.csv}
  - {type: generate, path: p.jsonl, scorer: json, keys: [a]}
  - {type: lm-eval, tasks: arc_easy}
  - {type: judge, path: mt.jsonl, url: "http://x/v1", model: big, mode: pairwise, timeout: 2min}
"""
    loss, choice, generate, harness, judge = _tasks(tmp_path, text)
    assert [s.path for s in loss.data] == ["a.jsonl", "b.jsonl"] and harness.tasks == ("arc_easy",)
    assert isinstance(choice, ChoiceTask) and choice.label == "q.csv" and choice.shots == 5
    assert isinstance(generate, GenerateTask) and generate.keys == ("a",)
    assert isinstance(judge, JudgeTask) and judge.timeout == 120


@pytest.mark.parametrize(
    ("task", "field", "problem"),
    [
        ("{type: choise, path: q}", "type", "no kind of task"),
        ("{path: q}", "type", "no kind of task"),
        ("{type: choice}", "path", "is required"),
        ("{type: choice, path: q, shotz: 3}", "shotz", "did you mean shots"),
        ("{type: choice, path: q, score: best}", "score", "expected 'byte'"),
        ("{type: choice, path: q, shots: 3}", "shots", "needs a file of examples"),
        ("{type: choice, path: q, examples: e}", "examples", "no effect"),
        ("{type: choice, path: q, template: hm}", "template", "where the question goes"),
        ("{type: generate, path: q, keys: [a]}", "keys", "no effect"),
        ("{type: generate, path: q, pattern: a}", "pattern", "no effect"),
        ("{type: judge, path: q, url: u}", "model", "is required"),
    ],
)
def test_mistakes_in_it(task: str, field: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        _tasks(tmp_path, f"tasks:\n  - {{type: loss}}\n  - {task}\n")
    assert caught.value.field == f"eval.yaml tasks.1.{field}"


def test_files_that_are_none(tmp_path: Path) -> None:
    for text in ("", "tasks: []", "tasks: 3", "a: [", "tasks: [loss]"):
        with pytest.raises(UserError):
            _tasks(tmp_path, text)
    with pytest.raises(UserError, match="cannot be read"):
        read_tasks(tmp_path / "none.yaml")


def test_options(llama: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    done = _run(llama, "--choice", file, "--limit", "2", "--score", "raw", "--json", "--output", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    found = told["results"][llama][0]
    assert found["figures"]["accuracy"]["count"] == 2 and set(found["figures"]) >= {"accuracy (byte)"}
    samples = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 and samples[0]["model"] == llama and samples[0]["task"] == "q.jsonl"
    for words, problem in (
        (("--scorer", "json"), "--scorer"),
        (("--limit", "3", "--data", file), "--limit"),
        (("--judge", file), "--judge-url"),
        (("--choice", file, "--choice", file), "two tasks have this name"),
    ):
        failed = _run(llama, *words)
        assert isinstance(failed.exception, UserError) and problem in str(failed.exception)
    failed = _run(llama, llama, "--choice", file)
    assert "named twice" in str(failed.exception)


def test_several_models_side_by_side(llama: str, other: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    shown = _run(llama, other, "--choice", file).stdout
    assert "accuracy" in shown and "±" in shown and "words" in shown and "difference to the first" in shown


def test_ctrl_c_keeps_what_is_done(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = write_lines(tmp_path / "q.jsonl", QUESTIONS)
    tasks = [ChoiceTask(path=file, name=name) for name in ("one", "two")]
    measure = command._measure

    def interrupted(task: Any, *more: Any) -> Any:
        if task.name == "two":
            raise KeyboardInterrupt
        return measure(task, *more)

    monkeypatch.setattr(command, "_measure", interrupted)
    with pytest.raises(Interrupted, match="1 of 2 measurements"):
        command.evaluate([llama], tasks, tmp_path / "out", False)
    assert "one" in capsys.readouterr().out
    assert [m["task"] for m in json.loads((tmp_path / "out/results.json").read_text())["results"][llama]] == ["one"]
