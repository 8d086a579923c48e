"""Which format rows have and why, what each row becomes, and that no row can bring the reader down."""

from __future__ import annotations

import json
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.sources import FIELD, take

from shardwise.config.schema import Source
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Example, Raw
from shardwise.data.files import chunk_tasks, read_chunk
from shardwise.data.formats import FORMATS, Detected, detect, understand
from shardwise.data.preference import check_format

Write = Callable[..., str]
HELLO = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "né 🙂"}]}'
USER, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def found(rows: list[Any], **settings: Any) -> Detected:
    raws = [Raw(f"rows:{i + 1}", i, row) for i, row in enumerate(rows)]
    return detect(raws, Source(path="rows", **settings), FIELD)


def example(row: Any, **settings: Any) -> Example:
    return understand(Raw("rows:1", 0, row), found([row], **settings), Source(path="rows", **settings))


def problem(row: Any, good: Any, **settings: Any) -> str:
    """What is said of a row in a source of good ones."""
    with pytest.raises(BadRow) as caught:
        understand(Raw("rows:9", 8, row), found([good], **settings), Source(path="rows", **settings))
    assert caught.value.where.startswith("rows:9") and caught.value.number == 8 and caught.value.remedy
    return caught.value.problem


# Detection


@pytest.mark.parametrize(
    ("row", "format", "others"),
    [
        ({"messages": [USER, SAID], "text": "x"}, "chat", "text"),
        ({"prompt": "x", "messages": [USER, SAID]}, "chat", ""),
        ({"prompt": "x", "chosen": [USER, SAID], "rejected": [USER, SAID], "messages": [USER]}, "preference", "chat"),
        ({"prompt": "x", "completion": "y", "label": True}, "kto", "prompt"),
        ({"input_ids": [1], "text": "x"}, "tokens", "text"),
        ({"instruction": "x", "input": "y", "output": "z"}, "alpaca", "prompt"),
        ({"text": "x", "summary": "y"}, "pair", "text"),
        ({"document": "x", "summary": "y"}, "pair", "text"),
        ({"question": "x", "answer": "y", "text": "z"}, "prompt", "text"),
        ({"input": "x", "output": "y"}, "prompt", ""),
        ({"instruction": "x", "response": "y"}, "prompt", ""),
    ],
)
def test_the_more_specific_format_wins_and_says_so(row: dict[str, Any], format: str, others: str) -> None:
    detected = found([row])
    assert detected.format == format
    assert (f"; {others} would fit too" in detected.reason or f" and {others} would" in detected.reason) == bool(others)
    for column in FIELDS_OF[format]:
        assert column in detected.reason or format == "prompt"


FIELDS_OF = {
    "chat": ["messages"], "preference": ["chosen", "rejected", "prompt"], "kto": ["label"], "tokens": ["input_ids"],
    "alpaca": ["instruction", "input", "output"], "pair": ["summary"], "prompt": [],
}  # fmt: skip


def test_reason_is_a_sentence_for_the_user() -> None:
    assert found([{"question": "x", "answer": "y", "id": 1}]).reason == (
        "prompt: the rows have question (as prompt), answer (as completion); joined as they stand, without a chat "
        "template; not used: id"
    )
    rows = [{"text": "x"}] * 9 + [{"other": 1}]
    assert found(rows).reason == "text: 90% of the first 10 rows have text; not used: other"
    assert found([{"body": "x"}], format="text").reason == "text, as set: the rows have body (as text)"


@pytest.mark.parametrize(
    ("row", "settings", "remedy"),
    [
        (
            {"question": "x", "answer": "y"},
            {"format": "chat"},
            "set format: alpaca with fields: {instruction: question, output: answer} to make turns of them, or format: "
            "prompt to join them as they stand",
        ),
        ({"text": "x"}, {"format": "chat"}, "set format: text, which these rows are, or leave it to auto"),
        ({"messages": [USER, SAID]}, {"format": "text"}, "set format: chat, which these rows are"),
        (
            {"instruction": "x", "output": "y"},
            {"format": "prompt"},
            "fields: {prompt: instruction, completion: output}",
        ),
        ({"a": "x", "b": "y"}, {"format": "prompt"}, "e.g. fields: {prompt: a, completion: b}"),
        ({"question": "x", "b": "y"}, {"fields": {"prompt": "questoin", "completion": "b"}}, "{prompt: question}?"),
    ],
)
def test_the_right_format_is_named(row: dict[str, Any], settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        found([row], **settings)
    assert remedy in caught.value.remedy and next(iter(row)) in caught.value.problem


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "use objective: dpo (or orpo) to learn what to prefer; or, to learn the good answers alone, fields: "
            "{prompt: prompt, completion: chosen}",
        ),
        ({"prompt": "q", "chosen": [USER, SAID], "rejected": [USER, SAID]}, "fields: {messages: chosen}"),
        ({"prompt": "q", "completion": "a", "label": True}, "objective: kto"),
    ],
)
def test_judged_rows_for_plain_fine_tuning(row: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        check_format(found([row]), "causal", "data.train.0", "a.jsonl")
    assert remedy in caught.value.remedy


def test_parts_of_a_text_do_not_run_together() -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two ", "three", "\nfour")]
    taken = example({"messages": [{"role": "user", "content": parts}, SAID]})
    assert taken.messages[0]["content"] == "one\ntwo three\nfour"


def test_a_few_bad_rows_do_not_change_the_format() -> None:
    rows = [{"messages": None}, {"text": "x"}, {"messages": "?"}] + [{"messages": [USER, SAID]}] * 20
    assert found(rows).format == "chat"
    assert found([{"text": 1}] * 3 + [{"text": "x"}]).format == "text"


def test_columns_may_bear_null_at_first() -> None:
    rows = [{"instruction": "x", "input": None, "output": "y"}, {"instruction": "x", "input": "z", "output": "y"}]
    assert found(rows).columns["input"] == "input"


def test_format_and_fields_are_obeyed() -> None:
    both = {"text": "t", "messages": [USER, SAID]}
    assert example(both).messages and example(both, format="text").text == "t"
    row = {"a": {"b": [{"c": "deep"}]}, "flat.name": "x"}
    assert example(row, fields={"text": "a.b.0.c"}).text == "deep"
    assert example(row, fields={"text": "a.b.-1.c"}).text == "deep"
    assert example(row, fields={"text": "flat.name"}).text == "x"
    taken = example({"q": "x", "a": "y"}, format="pair", fields={"source": "q", "target": "a"})
    assert (taken.kind, taken.prompt, taken.text) == ("pair", "x", "y")
    row = {"text": "a", "bits": [{"t": "x", "on": True}]}
    assert example(row, fields={"segments": "bits", "text": "t", "label": "on"}).segments == (("x", True),)


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({}, FIELD, "no format fits the rows (the columns of rows:1: foo, bar)"),
        ({"format": "chat"}, f"{FIELD}.format", "needed: messages"),
        ({"fields": {"text": "baz"}}, f"{FIELD}.fields", "its columns: foo, bar"),
        ({"fields": {"texts": "foo"}}, f"{FIELD}.fields", "texts is no name of ours"),
        ({"format": "text", "fields": {"prompt": "foo"}}, f"{FIELD}.fields", "no name of ours for text"),
    ],
)
def test_where_nothing_fits(settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        found([{"foo": "x", "bar": "y"}], **settings)
    assert caught.value.field == field and words in caught.value.problem and caught.value.remedy


def test_the_remedy_shows_how_to_map() -> None:
    with pytest.raises(UserError) as caught:
        found([{"foo": "x", "bar": "y"}])
    assert "fields: {prompt: foo, completion: bar}" in caught.value.remedy
    with pytest.raises(UserError) as caught:
        found([{"translation": {"en": "x", "de": "y"}}])
    assert "fields: {source: translation.en, target: translation.de}" in caught.value.remedy


def test_plain_text_has_one_format() -> None:
    assert found(["words"]).reason == "plain text: each file is one row"
    with pytest.raises(UserError) as caught:
        found(["words"], format="chat")
    assert (caught.value.field, caught.value.value) == (f"{FIELD}.format", "chat")
    assert "is plain text" in problem("words", {"messages": [USER]})


# Rows


def test_other_columns_are_ignored() -> None:
    row = {"id": 7, "messages": [{"role": "user", "content": "x", "name": "bob", "mood": "good"}], "text": 5}
    assert example(row).messages == ({"role": "user", "content": "x", "name": "bob"},)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', "not JSON"),
        ("[1, 2]", "this is a list"),
        ('"words"', "this is text"),
        ("{}", "its keys: none"),
        ('{"prompt": "a", "completion": "b"}', "its keys: completion, prompt"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": null}', "at least one message"),
        ('{"messages": NaN}', "at least one message"),
        ('{"messages": "hi"}', "not JSON"),
        ('{"messages": ["hi"]}', "role and content"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ('{"messages": [{"role": "user", "content": 5}]}', "role and content"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "only text can be learned"),
        ('{"messages": [{"role": "user", "content": [{"type": "video", "video": "x"}]}]}', "holds a video"),
        ('{"messages": [{"role": "user", "content": [{"image": "x"}]}]}', "holds an image"),
        ('{"messages": [{"role": "user", "content": [7]}]}', "only text can be learned"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "has no text"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "role and content"),
        ('{"messages": [{"content": "x"}]}', "unknown role None"),
        ('{"messages": [{"role": "narrator", "content": "x"}]}', "unknown role 'narrator'"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "unknown role ['user']"),
        ('{"messages": [{"role": "user", "content": "\\ud83d!"}]}', "half of a surrogate pair (\\ud83d"),
        ('{"messages": [{"role": "user", "content": "x", "weight": 2}]}', "weight must be 0 or 1"),
        ('{"messages": [{"role": "user", "content": "x", "weight": "1"}]}', "weight must be 0 or 1"),
        ('{"messages": [{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}]}', "only the assistant"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}', "needs the name of a function"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}', "not JSON"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]}', "must be an object"),
        ('{"messages": [{"role": "assistant", "tool_calls": 7}]}', "needs the name of a function"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "no"}', "tools is a string, and not JSON"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools must be a list of definitions"),
        ('{"messages": [{"role": "user", "content": "x"}], "system": 5}', '"system" must be a string'),
        ('{"messages": [{"role": "system", "content": "x"}], "system": "y"}', "has a system message besides"),
    ],
)
def test_bad_rows_name_file_and_line(write: Write, line: str, words: str) -> None:
    good = HELLO[:-1] + ', "tools": [], "system": ""}'
    path = write("a.jsonl", f"{good}\n\n{line}\n{good}\n")
    taken = take(path)
    (bad,) = taken.bad
    assert words in bad.problem and bad.where.startswith(f"{path}:3") and bad.number == 1
    assert len(taken.examples) == 2


def test_bad_message_is_named_by_its_number(write: Write) -> None:
    taken = take(write("a.jsonl", HELLO.replace("assistant", "narrator")))
    assert taken.bad[0].where.endswith("a.jsonl:1 message 2") and "assistant, system, tool, user" in taken.bad[0].remedy


@pytest.mark.parametrize("value", ["null", "5", "NaN", '["a"]', '{"a": 1}'])
def test_text_must_be_a_string(write: Write, value: str) -> None:
    (bad,) = take(write("a.jsonl", f'{{"text": "fine"}}\n{{"text": {value}}}\n')).bad
    assert 'no string under "text"' in bad.problem and bad.where.endswith(":2")


def test_whole_characters_from_surrogate_pairs_are_fine(write: Write) -> None:
    assert take(write("a.jsonl", '{"text": "\\ud83d\\ude42"}')).examples[0].text == "🙂"


def test_empty_strings_are_examples() -> None:
    assert example({"text": ""}).text == ""
    assert example({"prompt": "", "completion": ""}).kind == "pair"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
     "observation": "tool", "function": "tool", "tool": "tool", "system": "system", "user": "user",
     "assistant": "assistant", "Human": "user", "GPT": "assistant"}.items(),
)  # fmt: skip
def test_sharegpt_speakers(theirs: str, ours: str) -> None:
    row = {"conversations": [{"from": theirs, "value": "x"}]}
    assert example(row).messages == ({"role": ours, "content": "x"},)


def test_tool_calls_of_any_writing_become_one() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    for written in (
        [call],
        [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        [{"name": "f", "arguments": {"x": 1}}],
        [{"name": "f", "parameters": {"x": 1}}],
        json.dumps([call]),
        [json.dumps(call)],
        call,
    ):
        message = {"role": "assistant", "content": None, "tool_calls": written}
        assert example({"messages": [USER, message]}).messages[1]["tool_calls"] == [call]
    for written in ("", "{}", None, {}):
        message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": written}]}
        assert example({"messages": [USER, message]}).messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert "tool_calls" not in example({"messages": [USER, SAID | {"tool_calls": []}]}).messages[1]
    message = {"role": "tool", "content": {"temperature": 3, "at": "Köln"}}
    assert example({"messages": [USER, message]}).messages[1]["content"] == '{"temperature": 3, "at": "Köln"}'


def test_chat_examples_are_whole() -> None:
    """They are made by a short cut."""
    taken = example({"messages": [USER, SAID]})
    plain = Example("rows:1", 0, "chat", (USER, SAID))
    assert taken == plain == pickle.loads(pickle.dumps(taken)) and repr(taken) == repr(plain)
    assert asdict(taken) == asdict(plain) and replace(taken, text="x").messages == (USER, SAID)


def test_reasoning_is_kept() -> None:
    row = {"messages": [USER, SAID | {"reasoning_content": "hm"}]}
    assert example(row).messages[1] == SAID | {"reasoning_content": "hm"}


def test_a_system_column_shifts_the_weights() -> None:
    row = {"messages": [USER, SAID | {"weight": 1}], "system": "S"}
    taken = example(row)
    assert taken.messages[0] == {"role": "system", "content": "S"} and taken.weights == (None, None, 1)
    assert example({"messages": [{"role": "system", "content": "S"}, SAID], "system": "S"}).messages[1:] == (SAID,)


def test_prompts_of_messages_are_a_chat_whose_prompt_is_not_learned() -> None:
    taken = example({"prompt": [USER, SAID, USER], "completion": [SAID]})
    assert (taken.kind, taken.weights) == ("chat", (0, 0, 0, None)) and taken.messages == (USER, SAID, USER, SAID)
    assert example({"prompt": [USER], "completion": "a"}, format="prompt").messages == (USER, SAID)
    assert "has no string" in problem({"prompt": "x", "completion": 5}, {"prompt": "x", "completion": "y"})
    good = {"prompt": "x", "completion": "y", "system": ""}
    assert 'has "system", which strings' in problem(good | {"system": "S"}, good)


def test_pictures_beside_a_conversation_are_refused() -> None:
    row = {"conversations": [{"from": "human", "value": "<image> what is it?"}, {"from": "gpt", "value": "a dog"}]}
    assert len(example(row | {"images": [], "video": None}).messages) == 2
    assert 'something under "image"; only text can be learned' in problem(row | {"image": "dog.jpg"}, row)
    assert example({"text": "an article", "image": "https://x/y.jpg"}).text == "an article"


def test_chat_names_serve_for_sharegpt_too() -> None:
    row = {"log": {"turns": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}}
    assert example(row, fields={"messages": "log.turns"}).messages == (USER, SAID)
    row = {"log": [{"who": "human", "what": "q"}, {"who": "gpt", "what": "a"}]}
    fields = {"messages": "log", "role": "who", "content": "what"}
    for format in ("auto", "chat", "sharegpt"):
        assert example(row, format=format, fields=fields).messages == (USER, SAID)


def test_segments() -> None:
    good = {"segments": [{"text": "x", "label": True}]}
    assert "at least one segment" in problem({"segments": []}, good)
    assert "must be true or false, this is None" in problem({"segments": [{"text": "x"}]}, good)
    assert "must be true or false" in problem({"segments": [{"text": "x", "label": 3}]}, good)
    assert 'a string under "text"' in problem({"segments": [{"label": True}]}, good)


def test_tokens() -> None:
    assert example({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}).learned == (False, True, True)
    row = {"input_ids": [1, 2, 3, 0], "labels": [-100, 2, 3, -100], "attention_mask": [1, 1, 1, 0]}
    taken = example(row)
    assert taken.tokens == (1, 2, 3) and taken.learned == (False, True, True)
    assert example({"input_ids": [1, 2], "loss_mask": [1, 1], "labels": [-100, 2]}).learned == (False, True)
    for row, words in (
        ({"input_ids": [1 << 31]}, "no token id"),
        ({"input_ids": [10**40]}, "no token id"),
        ({"input_ids": [True]}, "whole numbers"),
        ({"input_ids": "abc"}, "not JSON"),
        ({"input_ids": [1], "loss_mask": [2]}, "0 and 1 only"),
        ({"input_ids": [1], "loss_mask": []}, "has 0 entries"),
    ):
        assert words in problem(row, {"input_ids": [1], "loss_mask": [1]})


def test_preferences() -> None:
    more = {"role": "assistant", "content": "b"}
    taken = example({"chosen": [USER, SAID, USER, SAID], "rejected": [USER, SAID, USER, more]})
    assert taken.messages == (USER, SAID, USER) and taken.chosen == (SAID,) and taken.rejected == (more,)
    taken = example({"prompt": [USER], "chosen": [SAID], "rejected": [more]})
    assert taken.messages == (USER,) and taken.chosen == (SAID,)
    taken = example({"prompt": [USER], "chosen": [USER, SAID], "rejected": [USER, more]})
    assert taken.messages == (USER,) and taken.rejected == (more,)
    taken = example({"prompt": "q", "chosen": "a", "rejected": "b", "system": "S"})
    assert taken.messages == ({"role": "system", "content": "S"}, USER)
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for row, words in (
        ({"chosen": "a", "rejected": "b"}, "there is no prompt"),
        ({"chosen": [USER, SAID], "rejected": [USER, SAID]}, "does not go on"),
        ({"chosen": [USER, SAID], "rejected": [USER]}, "what is rejected does not go on"),
        ({"prompt": "z", "chosen": [USER, SAID], "rejected": [USER, more]}, "the prompt is not in the messages"),
        ({"prompt": "q", "chosen": 5, "rejected": "b"}, "string or a list of messages"),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "at least one message"),
    ):
        assert words in problem(row, good)


def test_kto() -> None:
    for label, flag in ((True, True), (0, False), ("True", True), (1.0, True)):
        assert example({"prompt": "q", "completion": "a", "label": label}).label is flag
    good = {"prompt": "q", "completion": "a", "label": True}
    assert "label must be true or false" in problem(good | {"label": None}, good)
    assert "must be the assistant's" in problem(good | {"completion": [USER]}, good)


def test_history_of_alpaca() -> None:
    good = {"instruction": "x", "input": "", "output": "y", "history": [["a", "b"]]}
    for history in ("x", [["a"]], [["a", None]], {"a": "b"}):
        assert "history" in problem(good | {"history": history}, good)
    assert len(example(good | {"history": None}).messages) == 2


# Whatever comes


SEEDS: list[Any] = [
    json.loads(HELLO),
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ],
        "tools": [{"name": "f"}],
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, SAID | {"weight": 1}], "system": "S"},
    {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": '{"name": "f"}'}]},
    {"instruction": "a", "input": "b", "output": "c", "history": [["x", "y"]], "system": "z"},
    {"prompt": "a", "completion": "b"},
    {"prompt": [USER], "completion": [SAID]},
    {"text": "words 🙂"},
    {"segments": [{"text": "a", "label": True}]},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "z"}]},
    {"chosen": "\n\nHuman: x\n\nAssistant: y", "rejected": "\n\nHuman: x\n\nAssistant: z"},
    {"prompt": "a", "completion": "b", "label": True},
    {"document": "a", "summary": "b"},
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", " ", "\0", "\ud800", "é🙂", "[",
    "{}", "[]", '[{"role": "user"}]', "null", "NaN", [], {}, [[]], [{}], [None], {"": None}, [1.5], ["x", 1],
    {"role": "user", "content": "x"}, {"type": "image"}, [{"type": "text", "text": 3}], -100, "assistant", "weight",
]  # fmt: skip
KEYS = [
    "role",
    "content",
    "text",
    "weight",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "from",
    "value",
    "type",
    "x",
]


def mutate(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """A value with something in it changed."""
    if rng.random() < 0.12 + 0.05 * depth:
        return rng.choice(ODD)
    if isinstance(value, dict) and value:
        changed = dict(value)
        key = rng.choice(list(changed))
        match rng.randrange(5):
            case 0:
                del changed[key]
            case 1:
                changed[rng.choice(KEYS)] = rng.choice(ODD)
            case 2:
                changed[rng.choice(KEYS)] = changed.pop(key)
            case _:
                changed[key] = mutate(changed[key], rng, depth + 1)
        return changed
    if isinstance(value, list) and value:
        index = rng.randrange(len(value))
        changed_list = list(value)
        match rng.randrange(4):
            case 0:
                del changed_list[index]
            case 1:
                changed_list.insert(index, rng.choice(ODD))
            case _:
                changed_list[index] = mutate(changed_list[index], rng, depth + 1)
        return changed_list
    return rng.choice(ODD)


BITS = [b'"', b"{", b"]", b"\\", b"\xff", b"\0", b"\xe2\x80\xa8", b"\r", b",", b"\\ud800"]


def mangle(line: bytes, rng: random.Random) -> bytes:
    """A line with some of its bytes changed."""
    data = bytearray(line)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data[at:at] = rng.choice(
                    [b'"', b"{", b"]", b"\\", b"\xff", b"\0", b"\xe2\x80\xa8", b"\r", b",", b"\\ud800"]
                )
            case 1:
                del data[at : at + rng.randrange(1, 9)]
            case 2:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case _:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
    return bytes(data).replace(b"\n", b" ")


def odd_lines(seed: Any, count: int, rng: random.Random) -> list[bytes]:
    """Lines that resemble a row."""
    lines = []
    for _ in range(count):
        value = seed
        for _ in range(rng.randrange(1, 4)):
            value = mutate(value, rng)
        line = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        lines.append(mangle(line, rng) if rng.random() < 0.3 else line)
    return lines


def balanced(line: bytes) -> bool:
    """Whether a list stays a list with this in it."""
    try:
        return json.loads(line) is not ...
    except ValueError:
        return False


def test_ten_thousand_odd_rows_bring_nothing_down(tmp_path: Path) -> None:
    rng = random.Random(2024)
    began = time.process_time()
    rows = {"jsonl": 0, "json": 0, "csv": 0}
    formats, good = set(), 0
    for turn in range(100):
        seed = SEEDS[turn % len(SEEDS)]
        lines = [json.dumps(seed).encode(), *odd_lines(seed, 100, rng)]
        for kind, content in {
            "jsonl": b"\n".join(lines),
            "json": b"[" + b",\n".join(line for line in lines if turn % 2 or balanced(line)) + b"]",
            "csv": b"text,prompt\n" + b"\n".join(lines),
        }.items():
            path = tmp_path / f"a.{kind}"
            path.write_bytes(content)
            source = Source(path=str(path), format=rng.choice(["auto", "auto", "auto", *FORMATS]))  # type: ignore[arg-type]
            raws: list[Raw] = []
            try:
                for task in chunk_tasks(source, FIELD):
                    for row in read_chunk(task):
                        rows[kind] += 1
                        raws += [row] if isinstance(row, Raw) else []
            except UserError as error:
                assert kind != "jsonl" and error.problem and error.remedy
            try:
                detected = detect(raws[:100], source, FIELD)
            except UserError as error:
                assert error.problem and error.remedy
                detected = Detected(rng.choice(list(FORMATS)), "", {})
            formats.add(detected.format)
            for raw in raws:
                try:
                    good += understand(raw, detected, source).number == raw.number
                except BadRow as bad:
                    assert bad.problem and bad.remedy and "cannot be understood" not in bad.problem, (raw, bad)
    # A line of nothing but spaces is skipped; every other one is a row or a bad row.
    assert 10_000 <= rows["jsonl"] <= 10_100 and rows["csv"] > 1_000 and rows["json"] > 1_000
    assert formats == set(FORMATS) and good > 1_000
    assert time.process_time() - began < 60


@pytest.mark.parametrize("depth", [50, 500, 900, 990, 5000])
def test_nesting(write: Write, depth: int) -> None:
    for shape in ('{{"messages": {}}}', '{{"messages": [{{"role": "tool", "content": {}}}]}}', '{{"x": {}}}'):
        path = write("a.jsonl", f"{HELLO}\n" + shape.format("[" * depth + "]" * depth) + "\n")
        taken = take(path)
        assert len(taken.examples) + len(taken.bad) == 2
