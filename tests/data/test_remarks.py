"""Rows that go in and may not teach what was meant are counted, and told with what to do: in text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import cli
from support.chat import THINKING, chat_tokenizer
from support.tiny import CHATML, tiny_run

from shardwise.cli import main as command_line
from shardwise.config.schema import Data
from shardwise.data.examples import BadRow, Document, Example
from shardwise.data.prepare import prepare_data
from shardwise.data.render import Renderer
from shardwise.data.row_warnings import (
    BLANK_BEFORE,
    EMPTY_ANSWER,
    EMPTY_PIECE,
    FIRST_WORD,
    NOT_WRITTEN,
    RUN_TOGETHER,
    explained,
)

CALL = {"function": {"name": "f", "arguments": {}}}
KNOWING = CHATML.replace("m['content']", "m.get('reasoning_content', '') + m['content']")


def qa(question: str, answer: str, **more: Any) -> tuple[dict[str, Any], ...]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}


def remarks(example: Example, template: str = CHATML, **settings: Any) -> tuple[str, ...]:
    renderer = Renderer(chat_tokenizer(template), settings.pop("loss_on", "assistant"), "data.train.0", **settings)
    (document,) = renderer.render([example])
    assert isinstance(document, Document)
    return document.remarks


def chat(messages: tuple[dict[str, Any], ...], **more: Any) -> Example:
    return Example("a.jsonl:1", 0, "chat", messages, **more)


def pair(prompt: str, answer: str) -> Example:
    return Example("a.jsonl:1", 0, "pair", prompt=prompt, text=answer)


@pytest.mark.parametrize(
    ("example", "template", "found"),
    [
        (chat(qa("q", "a")), CHATML, ()),
        (chat(qa("q", "a", reasoning_content="so")), CHATML, ("reasoning_content",)),
        (chat(qa("q", "a", reasoning_content="")), CHATML, ()),
        (chat(qa("q", "a", name="Bob", thinking="so")), CHATML, ("name", "thinking")),
        (chat(qa("q", "a", tool_call_id="7")), CHATML, ()),  # ids only match calls with what they gave
        (chat(qa("q", "a"), tools=({"type": "function", "function": {"name": "f"}},)), CHATML, ("tools",)),
        (chat(qa("q", "a", tool_calls=[CALL])), CHATML, ("tool_calls",)),
        (chat(qa("q", "a")), THINKING, ()),
    ],
)
def test_fields_that_the_template_does_not_write(example: Example, template: str, found: tuple[str, ...]) -> None:
    assert remarks(example, template, loss_on="all") == tuple(NOT_WRITTEN + field for field in found)


def test_fields_that_the_template_writes_are_not_told_of() -> None:
    assert KNOWING != CHATML
    assert remarks(chat(qa("q", "a", reasoning_content="so, ")), KNOWING, loss_on="all") == ()
    assert remarks(chat(qa("q", "", reasoning_content="so, ")), KNOWING) == (), "it is no empty answer either"


def test_both_answers_of_a_pair_are_looked_at() -> None:
    prompt, (_, good), (_, bad) = qa("q", "")[:1], qa("", "good"), qa("", "bad", reasoning_content="so")
    example = Example("a.jsonl:1", 0, "preference", prompt, chosen=(good,), rejected=(bad,))
    assert remarks(example, purpose="preference") == (f"{NOT_WRITTEN}reasoning_content",)


@pytest.mark.parametrize(
    ("prompt", "answer", "found"),
    [
        ("2 + 2 =\n", "four", ()),
        ("the house ", "of it", (BLANK_BEFORE,)),
        ("the house", " of it", ()),
        ("th", "e house of it", (FIRST_WORD,)),
        ("The capital is", "Paris", (RUN_TOGETHER,)),
        ("北京", "你好", ()),  # scripts that have no blanks
        ("x\n", "\ny", ()),  # a blank that is not learned is no word
        ("q\n", "", (EMPTY_ANSWER,)),
        ("q", " \n", (EMPTY_ANSWER,)),
    ],
)
@pytest.mark.parametrize("other", ["", "é"])  # what is not ASCII is tokenised another way
def test_where_prompt_and_answer_meet(prompt: str, answer: str, found: tuple[str, ...], other: str) -> None:
    assert remarks(pair(other + prompt, answer)) == found
    assert remarks(pair(other + prompt, answer), loss_on="all") in ((), (EMPTY_ANSWER,)), "no boundary there"


def test_the_remedy_fits_the_prompt() -> None:
    renderer = Renderer(chat_tokenizer(CHATML), "assistant", "data.train.0")
    for prompt, answer, said in (("the ", "of", "take the blank"), ("th", "e", "begin the answer with a blank")):
        (document,) = renderer.render([pair(prompt, answer)])
        assert isinstance(document, BadRow) and document.remedy.startswith(said)


def test_words_that_run_together_now_and_then_are_meant() -> None:
    columns = {"prompt": "question", "completion": "answer"}
    few, many = ({RUN_TOGETHER: (n, "a.jsonl:1")} for n in (5, 6))
    assert explained(few, 10, "prompt", columns) == {}
    assert (
        "format: alpaca with fields: {instruction: question, output: answer}"
        in explained(many, 10, "prompt", columns)[RUN_TOGETHER]
    )


def test_pieces_of_a_split_with_nothing_to_learn_are_counted(write: Callable[..., str]) -> None:
    rows = [{"messages": qa("many words " * 60, "a")}] * 3
    data = Data.model_validate({"train": write("a.jsonl", rows), "sequence_length": 64, "over_length": "split"})
    (source,) = prepare_data(data, chat_tokenizer(CHATML), 0).train
    count, first = source.known["remarks"][EMPTY_PIECE]
    assert count % 3 == 0 and count > 3 and first.endswith("a.jsonl:1")
    assert source.known["documents"] == 3


def test_told_in_text_json_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "odd.jsonl"
    rows = [qa("q", "a")] * 3 + [qa("q", "", reasoning_content="so")] * 1 + [qa("q", "")] * 2
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    run = cli.write_run(tmp_path, tiny_run(tmp_path, data__train=str(file)))
    for words in ([], ["--json", "--html", str(tmp_path / "page.html")]):
        with pytest.raises(SystemExit) as left:
            command_line.main(["data", str(run), *words])
        assert left.value.code == 0
    out = capsys.readouterr().out
    text, _, values = out.partition("\n{\n")
    told = "1 row has `reasoning_content`, which this model's chat template does not write"
    empty = "3 rows have an empty answer"
    assert told in text and empty in text and "odd.jsonl:4" in text
    found = json.loads("{" + values)
    assert found["train"][0]["remarks"][f"{NOT_WRITTEN}reasoning_content"]["rows"] == 1
    assert any(w["kind"] == "rows" and told in w["text"] for w in found["warnings"])
    page = (tmp_path / "page.html").read_text()
    assert "reasoning_content" in page and empty in page
