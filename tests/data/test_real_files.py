"""Small files as people bring them: each is understood rightly, or refused with file, line and what to do."""

# ruff: noqa: E501 (a table reads best with one file per line)
from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.sources import take

from shardwise.config.schema import Source
from shardwise.core.errors import UserError
from shardwise.data.files import count_rows

Bytes = bytes | Callable[[], bytes]

USER, SAID = {"role": "user", "content": "Wie heißt du?"}, {"role": "assistant", "content": "Ada 🙂"}
CHAT = {"messages": [USER, SAID]}
SHARE = {"conversations": [{"from": "human", "value": "Wie heißt du?"}, {"from": "gpt", "value": "Ada 🙂"}]}
ALPACA = {"instruction": "Translate", "input": "chien", "output": "dog"}
PAIR = {"prompt": "2+2=", "completion": "4"}
TEXT = {"text": "Once upon a time"}
TALK = (USER, SAID)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def lines(*rows: Any, end: str = "\n", ascii: bool = False) -> bytes:
    return "".join((r if isinstance(r, str) else json.dumps(r, ensure_ascii=ascii)) + end for r in rows).encode()


def zst(data: bytes) -> Callable[[], bytes]:
    def compress() -> bytes:
        library = pytest.importorskip("zstandard")
        return bytes(library.ZstdCompressor().compress(data))

    return compress


def parquet(rows: list[dict[str, Any]], **options: Any) -> Callable[[], bytes]:
    def write() -> bytes:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        sink = io.BytesIO()
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), sink, **options)
        return sink.getvalue()

    return write


def arrow(rows: list[dict[str, Any]], kind: str) -> Callable[[], bytes]:
    def write() -> bytes:
        pa = pytest.importorskip("pyarrow")
        table, sink = pa.Table.from_pylist(rows), io.BytesIO()
        with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    return write


def feather(rows: list[dict[str, Any]]) -> Callable[[], bytes]:
    def write() -> bytes:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.feather

        sink = io.BytesIO()
        pyarrow.feather.write_feather(pa.Table.from_pylist(rows), sink)
        return sink.getvalue()

    return write


@dataclass(frozen=True)
class File:
    """A file, how it is read and what must come of it."""

    name: str
    content: Bytes
    format: str = ""
    first: dict[str, Any] = field(default_factory=dict)  # attributes of the first example
    rows: int = 1  # examples
    bad: dict[str, str] = field(default_factory=dict)  # where a bad row stands → words of what is said of it
    error: tuple[str, str] | None = None  # end of the value, words of the problem
    reason: str = ""
    set: dict[str, Any] = field(default_factory=dict)


GZ = gzip.compress(lines(CHAT, CHAT))
BROKEN_CHAT = '{"messages": [{"role": "user", "content": "cut of'

FILES = [
    # chat, in every container
    File("chat.jsonl", lines(CHAT, CHAT), "chat", {"messages": TALK, "kind": "chat"}, 2, reason="rows have messages"),
    File("chat.ndjson", lines(CHAT), "chat", {"messages": TALK}),
    File("UPPER.JSONL", lines(CHAT), "chat", {"messages": TALK}),
    File("bom-crlf.jsonl", b"\xef\xbb\xbf" + lines(CHAT, CHAT, end="\r\n"), "chat", {"messages": TALK}, 2),
    File("no-last-newline.jsonl", lines(CHAT, CHAT)[:-1], "chat", {"messages": TALK}, 2),
    File("blank-lines.jsonl", lines("", CHAT, "   ", "\t", CHAT, ""), "chat", {"messages": TALK}, 2),
    File("escaped.jsonl", lines(CHAT, ascii=True), "chat", {"messages": TALK}),
    File("chat.jsonl.gz", GZ, "chat", {"messages": TALK, "where": "chat.jsonl.gz:1"}, 2),
    File("chat.jsonl.zst", zst(lines(CHAT, CHAT)), "chat", {"messages": TALK}, 2),
    File("chat.jsonl.bz2", bz2.compress(lines(CHAT)), "chat", {"messages": TALK}),
    File("chat.jsonl.xz", lzma.compress(lines(CHAT)), "chat", {"messages": TALK}),
    File("two-members.jsonl.gz", GZ + GZ, "chat", {"messages": TALK}, 4),
    File("list.json", json.dumps([CHAT, CHAT], indent=2).encode(), "chat", {"messages": TALK, "where": "list.json:2"}, 2),
    File("list.json.gz", gzip.compress(json.dumps([CHAT]).encode()), "chat", {"messages": TALK}),
    File("under-data.json", json.dumps({"version": 1, "data": [CHAT, CHAT]}).encode(), "chat", {"messages": TALK}, 2),
    File("one-row.json", json.dumps(CHAT, indent=1).encode(), "chat", {"messages": TALK}),
    File("lines-after-all.json", lines(CHAT, CHAT), "chat", {"messages": TALK, "where": "lines-after-all.json:1"}, 2),
    File("pretty-objects.json", (json.dumps(CHAT, indent=1) + "\n" + json.dumps(CHAT, indent=1)).encode(), "chat", {}, 2),
    File("columns.json", json.dumps({"messages": [[USER, SAID]] * 3, "id": [1, 2, 3]}).encode(), "chat", {"messages": TALK, "where": "columns.json row 1"}, 3),
    File("chat.csv", f'id,messages\n7,"{json.dumps(CHAT["messages"]).replace(chr(34), chr(34) * 2)}"\n'.encode(), "chat", {"messages": TALK, "where": "chat.csv:2"}),
    File("chat.parquet", parquet([CHAT, CHAT]), "chat", {"messages": TALK, "where": "chat.parquet row 1"}, 2),
    File("groups.parquet", parquet([CHAT] * 5, row_group_size=2), "chat", {"messages": TALK}, 5),
    File("file.arrow", arrow([CHAT], "file"), "chat", {"messages": TALK, "where": "file.arrow row 1"}),
    File("stream.arrow", arrow([CHAT], "stream"), "chat", {"messages": TALK}),
    File("chat.feather", feather([CHAT]), "chat", {"messages": TALK}),
    File("chat.parquet.gz", lambda: gzip.compress(parquet([CHAT])()), "chat", {"messages": TALK}),
    # chat, in its varieties
    File("parts.jsonl", lines({"messages": [{"role": "user", "content": [{"type": "text", "text": "Wie "}, {"type": "text", "text": "heißt du?"}]}, SAID]}), "chat", {"messages": TALK}),
    File("image.jsonl", lines(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, SAID]}), "chat", bad={"image.jsonl:2 message 1": "holds an image; only text can be learned"}),
    File("audio.jsonl", lines(CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}), "chat", bad={"audio.jsonl:2 message 1": "holds an audio; only text can be learned"}),
    File("tools.jsonl", lines({"tools": [WEATHER], "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}]}, {"role": "tool", "tool_call_id": "c1", "content": "rain"}, SAID]}), "chat", {"tools": (WEATHER,), "messages": (USER, {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}]}, {"role": "tool", "content": "rain", "tool_call_id": "c1"}, SAID)}, reason="messages, tools"),
    File("tools-string.jsonl", lines({"tools": json.dumps([WEATHER["function"]]), **CHAT}), "chat", {"tools": (WEATHER,)}),
    File("legacy.jsonl", lines({"messages": [USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, {"role": "function", "name": "f", "content": "1"}]}), "chat", {"messages": (USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}, {"role": "tool", "content": "1", "name": "f"})}),
    File("tools.parquet", parquet([{"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {"b": "x"}}}]}]}]), "chat", {"messages": (USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}, {"type": "function", "function": {"name": "g", "arguments": {"b": "x"}}}]})}),
    File("weights.jsonl", lines({"messages": [USER, SAID | {"weight": 0}, USER, SAID | {"weight": 1}]}), "chat", {"weights": (None, 0, None, 1)}),
    File("weight-2.jsonl", lines(CHAT, {"messages": [USER, SAID | {"weight": 0.5}]}), "chat", bad={"weight-2.jsonl:2 message 2": "weight must be 0 or 1"}),
    File("developer.jsonl", lines({"messages": [{"role": "developer", "content": "Be kind."}, USER, SAID]}), "chat", {"messages": ({"role": "system", "content": "Be kind."}, USER, SAID)}),
    File("both.jsonl", lines(CHAT | TEXT | {"id": 3}), "chat", {"messages": TALK}, reason="text would fit too"),
    File("nested.jsonl", lines({"meta": {"log": [{"who": "human", "said": "Wie heißt du?"}, {"who": "bot", "said": "Ada 🙂"}]}}), "chat", {"messages": TALK}, set={"fields": {"messages": "meta.log", "role": "who", "content": "said"}}),
    File("thread.jsonl", lines({"thread": [USER, SAID]}), "chat", {"messages": TALK}, reason="thread (as messages)"),
    # ShareGPT
    File("share.json", json.dumps([SHARE]).encode(), "sharegpt", {"messages": TALK, "kind": "chat"}, reason="conversations"),
    File("share.jsonl.zst", zst(lines(SHARE)), "sharegpt", {"messages": TALK}),
    File("share-system.jsonl", lines(SHARE | {"system": "Be kind.", "tools": "[]"}), "sharegpt", {"messages": ({"role": "system", "content": "Be kind."}, *TALK)}),
    File("share-tools.jsonl", lines({"conversations": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}, {"from": "observation", "value": "2"}, {"from": "gpt", "value": "two"}]}), "sharegpt", {"messages": ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "two"})}),
    File("openai-in-conversations.jsonl", lines({"conversations": [USER, SAID]}), "chat", {"messages": TALK}),
    # Alpaca
    File("alpaca.json", json.dumps([ALPACA, ALPACA | {"input": ""}]).encode(), "alpaca", {"messages": ({"role": "user", "content": "Translate\n\nchien"}, {"role": "assistant", "content": "dog"}), "kind": "chat"}, 2, reason="less specific"),
    File("alpaca.csv", b'instruction,input,output\r\n"Say ""hi""\nto all",,hi\r\n', "alpaca", {"messages": ({"role": "user", "content": 'Say "hi"\nto all'}, {"role": "assistant", "content": "hi"})}),
    File("alpaca.tsv", b"instruction\tinput\toutput\nadd, then\t1 2\t3\n", "alpaca", {"messages": ({"role": "user", "content": "add, then\n\n1 2"}, {"role": "assistant", "content": "3"})}),
    File("alpaca.parquet", parquet([ALPACA]), "alpaca", {"kind": "chat"}),
    File("dolly.jsonl", lines({"instruction": "Q", "context": "C", "response": "A", "category": "x"}), "alpaca", {"messages": ({"role": "user", "content": "Q\n\nC"}, {"role": "assistant", "content": "A"})}, reason="not used: category"),
    File("history.jsonl", lines(ALPACA | {"input": "", "history": [["a", "b"]], "system": "S"}), "alpaca", {"messages": ({"role": "system", "content": "S"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "Translate"}, {"role": "assistant", "content": "dog"})}),
    # prompt and completion
    File("pair.jsonl", lines(PAIR), "prompt", {"kind": "pair", "prompt": "2+2=", "text": "4"}, reason="without a chat template"),
    File("qa.csv", b"question;answer\nWas, und warum?;42\n", "prompt", {"prompt": "Was, und warum?", "text": "42"}, reason="question (as prompt)"),
    File("response.parquet", parquet([{"prompt": "a", "response": "b", "score": 1.0}]), "prompt", {"prompt": "a", "text": "b"}),
    File("lists.jsonl", lines({"prompt": [USER], "completion": [SAID]}), "prompt", {"kind": "chat", "messages": TALK, "weights": (0, None)}),
    File("mapped.jsonl", lines({"q": "x?", "a": {"texts": ["y", "z"]}}), "prompt", {"prompt": "x?", "text": "z"}, set={"fields": {"prompt": "q", "completion": "a.texts.1"}}),
    File("as-chat.jsonl", lines({"q": "x?", "a": "y"}), "alpaca", {"messages": ({"role": "user", "content": "x?"}, {"role": "assistant", "content": "y"})}, set={"format": "alpaca", "fields": {"instruction": "q", "output": "a"}}),
    # text
    File("story.txt", b"\xef\xbb\xbfone\r\ntwo\xe2\x80\xa8three", "text", {"text": "one\ntwo\u2028three", "where": "story.txt"}, reason="plain text"),
    File("notes.md", b"# Title\n\ntext", "text", {"text": "# Title\n\ntext"}),
    File("main.py.gz", gzip.compress(b"print(1)\n"), "text", {"text": "print(1)\n"}),
    File("lib.rs", b"fn main() {}\n", "text", {"text": "fn main() {}\n"}),
    File("text.jsonl", lines({"text": "a\u2028b\u0085c"}, TEXT), "text", {"text": "a\u2028b\u0085c"}, 2),
    File("code.parquet", parquet([{"code": "x = 1", "repo": "r"}]), "text", {"text": "x = 1"}, reason="code (as text)"),
    File("pandas.json", json.dumps({"text": {"0": "a", "1": "b"}, "n": {"0": 1, "1": 2}}).encode(), "text", {"text": "a"}, 2),
    File("by-id.json", json.dumps({"id1": {"text": "a"}, "id2": {"text": "b"}}).encode(), "text", {"text": "a"}, 2),
    File("one-translation.json", json.dumps({"translation": {"en": "dog", "de": "Hund"}}).encode(), "pair", {"text": "Hund"}, set={"fields": {"source": "translation.en", "target": "translation.de"}}),
    File("deep-columns.json", f'{{"text": ["a", "b"], "x": [1, {"[" * 800}{"]" * 800}]}}'.encode(), error=("deep-columns.json rows 1 to 2", "nested too deeply")),
    File("nan.jsonl", lines('{"text": "a", "score": NaN, "top": Infinity}'), "text", {"text": "a"}),
    File("nul-escape.jsonl", lines('{"text": "a\\u0000b"}'), "text", {"text": "a\0b"}),
    # segments, tokens, preferences, KTO, pairs
    File("segments.jsonl", lines({"segments": [{"text": "<s>", "label": False}, {"text": "x", "label": True}]}), "segments", {"segments": (("<s>", False), ("x", True))}),
    File("segments-learn.jsonl", lines({"segments": [{"text": "a", "learn": 0}, {"text": "b", "learn": 1}]}), "segments", {"segments": (("a", False), ("b", True))}),
    File("tokens.jsonl", lines({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}), "tokens", {"tokens": (5, 6, 7), "learned": (False, True, True)}),
    File("tokens.parquet", parquet([{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}]), "tokens", {"tokens": (5, 6), "learned": None}),
    File("shifted.jsonl", lines({"input_ids": [5, 6], "labels": [6, 7]}, {"input_ids": [1], "labels": [1, 2]}, {"input_ids": [-1]}, {"input_ids": [1.5]}, {"input_ids": [1]}), "tokens", {"tokens": (1,)}, bad={"shifted.jsonl:1": "a label is the token itself or -100", "shifted.jsonl:2": "has 2 entries, input_ids 1", "shifted.jsonl:3": "-1 is no token id", "shifted.jsonl:4": "list of whole numbers"}),
    File("dpo.jsonl", lines({"prompt": "Q", "chosen": "good", "rejected": "bad"}), "preference", {"messages": ({"role": "user", "content": "Q"},), "chosen": ({"role": "assistant", "content": "good"},), "rejected": ({"role": "assistant", "content": "bad"},)}),
    File("dpo-prefix.parquet", parquet([{"chosen": [USER, SAID], "rejected": [USER, SAID | {"content": "no"}], "prompt": "Wie heißt du?"}]), "preference", {"messages": (USER,), "chosen": (SAID,), "rejected": (SAID | {"content": "no"},)}),
    File("hh.jsonl.gz", gzip.compress(lines({"chosen": "\n\nHuman: Q\n\nAssistant: good", "rejected": "\n\nHuman: Q\n\nAssistant: bad"})), "preference", {"messages": ({"role": "user", "content": "Q"},), "rejected": ({"role": "assistant", "content": "bad"},)}),
    File("same.jsonl", lines({"prompt": "Q", "chosen": "a", "rejected": "b"}, {"prompt": "Q", "chosen": "a", "rejected": "a"}), "preference", bad={"same.jsonl:2": "are the same"}),
    File("kto.csv", b"prompt,completion,label\nQ,A,True\nQ,B,false\n", "kto", {"messages": ({"role": "user", "content": "Q"},), "chosen": ({"role": "assistant", "content": "A"},), "label": True}, 2, reason="prompt would fit too"),
    File("rated.jsonl", lines(PAIR | {"label": 4}), "prompt", {"kind": "pair"}),
    File("summary.csv", b"document,summary\nlong,short\n", "pair", {"kind": "pair", "prompt": "long", "text": "short"}),
    File("wmt.parquet", parquet([{"translation": {"en": "dog", "de": "Hund"}}]), "pair", {"prompt": "dog", "text": "Hund"}, set={"fields": {"source": "translation.en", "target": "translation.de"}}),
    File("wmt-unmapped.jsonl", lines({"translation": {"en": "dog", "de": "Hund"}}), error=("wmt-unmapped.jsonl", "no format fits")),
    # what is wrong, and where
    File("broken-line.jsonl", lines(CHAT, BROKEN_CHAT, CHAT), "chat", {}, 2, bad={"broken-line.jsonl:2": "not JSON"}),
    File("latin1.jsonl", lines(CHAT) + '{"text": "é"}\n'.encode("latin-1") + lines(CHAT), "chat", {}, 2, bad={"latin1.jsonl:2": "is not UTF-8 text"}),
    File("utf16.jsonl", lines(CHAT).decode().encode("utf-16"), error=("utf16.jsonl", "is not UTF-8 text (it is UTF-16)")),
    File("nul.jsonl", lines(CHAT) + b"\0" * 64, "chat", bad={"nul.jsonl:2": "NUL bytes"}),
    File("binary.txt", b"\x7fELF\0\0\0", bad={"binary.txt": "it is no text"}),
    File("latin1.txt", b"ok\ncaf\xe9", bad={"latin1.txt:2": "is not UTF-8 text"}),
    File("half.jsonl", lines(TEXT, '{"text": "a\\udc00"}'), "text", bad={"half.jsonl:2": "half of a surrogate pair (\\udc00 at character 2)"}),
    File("twice.jsonl", lines(TEXT, '{"text": "a", "text": "b"}'), "text", bad={"twice.jsonl:2": 'has the key "text" twice'}),
    File("deep.jsonl", lines(TEXT, '{"text": ' + "[" * 100000 + "]" * 100000 + "}"), "text", bad={"deep.jsonl:2": "nested too deeply"}),
    File("deep.json", f'[{{"text": "a"}},\n{{"x": {"[" * 100000}{"]" * 100000}}}]'.encode(), "text", bad={"deep.json:2": "nested too deeply"}),
    File("digits.jsonl", lines(TEXT, '{"text": "a", "n": ' + "9" * 5000 + "}"), "text", bad={"digits.jsonl:2": "cannot be read"}),
    File("lists-of-lists.jsonl", lines(TEXT, [1, 2], '"words"'), "text", bad={"lists-of-lists.jsonl:2": "this is a list", "lists-of-lists.jsonl:3": "this is text"}),
    File("mixed.jsonl", lines(CHAT, CHAT, CHAT, TEXT), "chat", {}, 3, bad={"mixed.jsonl:4": 'has no "messages"'}),
    File("fields.csv", b'prompt,completion\na,b\nc,d,e\n\n,\n"f\ng",h\n', "prompt", {"prompt": "a"}, 2, bad={"fields.csv:3": "has 3 fields, the header names 2"}),
    File("quote.csv", b'prompt,completion\na,b\n"c,d\ne,f\n', "prompt", bad={"quote.csv:3": "a quote is not closed"}),
    File("latin1.csv", b"prompt,completion\na,b\ncaf\xe9,d\n", "prompt", bad={"latin1.csv:3": "is not UTF-8 text"}),
    File("no-header.csv", b"yes,yes\nno,no\n", error=("no-header.csv:1", "must name the columns")),
    File("cut.jsonl.gz", GZ[:-12], error=("cut.jsonl.gz", "cut off")),
    File("cut.jsonl.zst", lambda: zst(lines(*[CHAT] * 50))()[:-9], error=("cut.jsonl.zst", "cut off")),
    File("not.jsonl.gz", lines(CHAT), error=("not.jsonl.gz", "not compressed as its suffix says")),
    File("not.jsonl.zst", lines(CHAT), error=("not.jsonl.zst", "not compressed as its suffix says")),
    File("none.parquet", lines(CHAT), error=("none.parquet", "is no Parquet file")),
    File("none.arrow", lines(CHAT), error=("none.arrow", "is no Arrow file")),
    File("cut.parquet", lambda: parquet([CHAT] * 9)()[:-40], error=("cut.parquet", "is no Parquet file")),
    File("cut.json", b'[{"text": "a"},\n{"text": "b"', error=("cut.json:2", "ends within a value")),
    File("comma.json", b'[{"text": "a"}\n{"text": "b"}]', error=("comma.json:2", "expected , or ]")),
    File("scalar.json", b"42", error=("scalar.json:1", "neither a list of rows nor an object")),
    File("two-lists.json", json.dumps({"a": [TEXT], "b": [TEXT, TEXT]}).encode(), error=("two-lists.json", "several lists of rows: a, b")),
    File("splits.json", json.dumps({"train": [TEXT], "test": [TEXT, TEXT]}).encode(), "text", {"text": "Once upon a time"}, 2, set={"split": "test"}),
    File("empty.jsonl", b"", error=("empty.jsonl", "holds no rows")),
    File("empty.json", b"[]", error=("empty.json", "holds no rows")),
    File("empty.txt", b"\xef\xbb\xbf", error=("empty.txt", "holds no rows")),
    File("header-only.csv", b"prompt,completion\n", error=("header-only.csv", "holds no rows")),
    File("list.jsonl", json.dumps([CHAT, CHAT], indent=1).encode(), "chat", {"messages": TALK, "where": "list.jsonl:2"}, 2),
    File("list.jsonl.gz", gzip.compress(b"\xef\xbb\xbf" + json.dumps([CHAT, CHAT]).encode()), "chat", {"messages": TALK}, 2),
    File("zipped.jsonl", GZ, error=("zipped.jsonl", "compressed by gzip, which its name does not say")),
    File("zipped.csv", zst(lines(CHAT)), error=("zipped.csv", "compressed by zstd")),
    File("pointer.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", error=("pointer.parquet", "a Git LFS pointer")),
    File("comma.jsonl", lines(TEXT, '{"text": "a"},'), "text", bad={"comma.jsonl:2": "not JSON (Extra data at character 14)"}),
    File("data.xlsx", b"PK", error=("data.xlsx", "files of kind .xlsx are not understood")),
    File("unknown.jsonl", lines({"foo": "a", "bar": "b"}), error=("unknown.jsonl", "no format fits the rows")),
    File("python-repr.csv", b"messages\n\"[{'role': 'user', 'content': 'x'}]\"\n", error=("chat", "needed: messages"), set={"format": "chat", "fields": {"messages": "talk"}}),
]  # fmt: skip


def test_the_table_is_long_enough() -> None:
    assert len({f.name for f in FILES}) == len(FILES) >= 60


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_file(file: File, tmp_path: Path) -> None:
    content = file.content() if callable(file.content) else file.content
    path = tmp_path / file.name
    path.write_bytes(content)
    if file.error is not None:
        with pytest.raises(UserError) as caught:
            take(str(path), **file.set)
        value, words = file.error
        assert words in caught.value.problem and caught.value.remedy
        assert str(caught.value.value).endswith(value) or file.set
        return
    taken = take(str(path), **file.set)
    said = {b.where.removeprefix(f"{tmp_path}/"): b.problem for b in taken.bad}
    assert said.keys() == file.bad.keys()
    for where, words in file.bad.items():
        assert words in said[where]
    assert all(b.remedy for b in taken.bad)
    assert count_rows(Source(path=str(path), **file.set), "data.train.0") == len(taken.examples) + len(taken.bad)
    if taken.detected is None:
        return
    assert taken.detected.format == file.format and file.reason in taken.detected.reason
    assert len(taken.examples) == file.rows
    example = taken.examples[0]
    for name, expected in file.first.items():
        found = example.where.removeprefix(f"{tmp_path}/") if name == "where" else getattr(example, name)
        assert found == expected, name
