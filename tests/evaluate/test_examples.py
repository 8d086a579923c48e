"""The scripts of examples/evaluation: what they teach is what is measured."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.load import load_run
from shardwise.evaluate.choices import ChoiceQuestion, Prompts
from shardwise.evaluate.judge import read_judged
from shardwise.evaluate.settings import ChoiceTask, JudgeTask, read_tasks
from shardwise.evaluate.verdicts import read_rating, read_verdict

FOLDER = Path(__file__).parents[2] / "examples/evaluation"
ROW: dict[str, Any] = {"question": "What shines?", "choices": ["mud", "the sun", "coal"], "answer": 1}


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pairs_are_in_the_words_of_the_evaluation(loaded: Any) -> None:
    _, tokenizer = loaded
    pair = _script("olmo_tasks").pair(ROW)
    question = ChoiceQuestion("here", ROW["question"], tuple(ROW["choices"]), ROW["answer"])
    scored = Prompts(ChoiceTask(path="it"), tokenizer, []).requests(question)[ROW["answer"]]
    assert tokenizer.decode(scored.ids[: scored.begin], skip_special_tokens=True) == pair["prompt"]
    assert tokenizer.decode(scored.ids[scored.begin :]) == pair["completion"]


def test_preferences_are_in_the_words_of_a_chat(loaded: Any) -> None:
    _, tokenizer = loaded
    row = _script("olmo_tasks").preference(ROW, random.Random(0))
    assert row["chosen"] == "the sun" and row["rejected"] in ("mud", "coal")
    question = ChoiceQuestion("here", ROW["question"], tuple(ROW["choices"]), ROW["answer"])
    (task,) = read_tasks(FOLDER / "openbookqa_chat.yaml")
    scored = Prompts(task, tokenizer, []).requests(question)[ROW["answer"]]
    messages = [{"role": "user", "content": row["prompt"]}]
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(scored.ids) == asked + row["chosen"]


def test_a_judge_is_taught_verdicts_that_can_be_read() -> None:
    draw, conversation = random.Random(0), _script("judge_rows").conversation
    seen = set()
    for _ in range(40):
        *asked, told = conversation(ROW, draw)
        words, said = asked[-1]["content"], told["content"]
        if (rating := read_rating(said)) is not None:
            assert (rating > 5) == ("the sun" in words)
            seen.add(rating)
        else:
            verdict = read_verdict(said)
            assert f"### Assistant {verdict}\nthe sun" in words
            seen.add(verdict)
    assert seen == {9.0, 2.0, "A", "B"}


@pytest.mark.parametrize("name", ["openbookqa_lora", "openbookqa_answers", "judge_lora"])
def test_the_runs_are_valid(name: str) -> None:
    assert load_run(FOLDER / f"{name}.yaml").run.method.type == "lora"


def test_the_tasks_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    tasks = read_tasks(FOLDER / "judge.yaml")
    assert [task.mode for task in tasks if isinstance(task, JudgeTask)] == ["single", "pairwise"]
    assert sum(len(question.turns) for question in read_judged(tasks[0])) == 7
