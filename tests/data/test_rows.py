"""What is read from files, and where a bad row is said to stand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.schema import Source
from shardwise.data.rows import read_rows, source_files
from shardwise.errors import UserError

Write = Callable[..., str]
HELLO = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "né 🙂"}]}'


def rows(path: str, format: Any = "auto") -> list[Any]:
    return list(read_rows(Source(path=path, format=format), "data.train.0"))


def mistake(path: str, format: Any = "auto") -> UserError:
    with pytest.raises(UserError) as caught:
        rows(path, format)
    return caught.value


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("last", ["", "NEWLINE"], ids=["open", "closed"])
def test_lines_of_any_editor(write: Write, bom: bytes, newline: str, last: str) -> None:
    text = newline.join([HELLO, "", '{"text": "a\\r\\nb"}', "   ", HELLO]) + last.replace("NEWLINE", newline)
    path = write("a.jsonl", bom + text.encode())
    found = rows(path)
    assert [r.where for r in found] == [f"{path}:1", f"{path}:3", f"{path}:5"]  # lines as an editor counts them
    assert found[0].messages == ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "né 🙂"})
    assert found[1].text == "a\r\nb" and found[1].messages is None


def test_text_files_are_one_row(write: Write) -> None:
    path = write("a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\xe2\x80\xa8three")
    (row,) = rows(path)
    assert (row.text, row.where) == ("one\n\ntwo\u2028three", path)


def test_line_separators_inside_a_row_do_not_split_it(write: Write) -> None:
    path = write("a.jsonl", '{"text": "a\u2028b\u0085c\u000bd"}\n'.replace("\u000b", "\\u000b"))
    (row,) = rows(path)
    assert row.text == "a\u2028b\u0085c\u000bd"


def test_other_columns_are_ignored(write: Write) -> None:
    path = write("a.jsonl", '{"id": 7, "messages": [{"role": "user", "content": "x", "name": "bob"}], "text": 5}\n')
    assert rows(path)[0].messages == ({"role": "user", "content": "x"},)


def test_globs_folders_and_single_files(write: Write, tmp_path: Path) -> None:
    for name in ("d/b.jsonl", "d/a.jsonl", "d/deep/c.txt", "d/notes.md", "d/UPPER.TXT", "d/skip.csv", "d/e.ndjson"):
        write(name, HELLO if "json" in name else "text")
    (tmp_path / "d/folder.txt").mkdir()

    def names(path: str) -> list[str]:
        return [str(f.relative_to(tmp_path / "d")) for f in source_files(Source(path=path), "data.train.0")]

    assert names(f"{tmp_path}/d") == ["UPPER.TXT", "a.jsonl", "b.jsonl", "deep/c.txt", "e.ndjson", "notes.md"]
    assert names(f"{tmp_path}/d/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/d/**/*.txt") == ["deep/c.txt"]
    assert names(f"{tmp_path}/d/[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/d/b.jsonl") == ["b.jsonl"]
    assert len(rows(f"{tmp_path}/d/*.jsonl")) == 2


def test_a_file_whose_name_looks_like_a_pattern(write: Write) -> None:
    assert len(rows(write("data[1].jsonl", HELLO))) == 1


def test_home_is_expanded(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.jsonl", HELLO)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(rows("~/a.jsonl")) == len(rows("~/*.jsonl")) == 1


def test_files_that_are_not_there(tmp_path: Path, write: Write) -> None:
    write("a.csv", "x")
    (tmp_path / "empty").mkdir()
    for name, problem in {
        "absent.jsonl": "there is no such file",
        "*.jsonl": "matches no",
        "empty": "matches no",
        "a.csv": "files of kind .csv are not understood",
        "absent.csv": "there is no such file",
    }.items():
        error = mistake(f"{tmp_path}/{name}")
        assert error.field == "data.train.0" and error.value == f"{tmp_path}/{name}" and problem in error.problem


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', "not JSON"),
        ("[1, 2]", "this is a list"),
        ('"words"', "this is a str"),
        ("{}", "its keys: none"),
        ('{"prompt": "a", "completion": "b"}', "its keys: completion, prompt"),
        ('{"text": null}', 'no string under "text"'),
        ('{"messages": []}', "at least one message"),
        ('{"messages": "hi"}', "at least one message"),
        ('{"messages": ["hi"]}', "role and content"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "role and content"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "role and content"),
        ('{"messages": [{"content": "x"}]}', "unknown role None"),
        ('{"messages": [{"role": "human", "content": "x"}]}', "unknown role 'human'"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "unknown role ['user']"),
        ('{"messages": [{"role": "user", "content": "\\ud83d!"}]}', "half of a surrogate pair (\\ud83d"),
        ('{"text": "a\\udc00"}', "half of a surrogate pair (\\udc00 at character 2)"),
    ],
)
def test_bad_rows_name_file_and_line(write: Write, line: str, words: str) -> None:
    path = write("a.jsonl", f'{HELLO}\n\n{line}\n{{"text": "fine"}}\n')
    error = mistake(path)
    assert error.field == "data.train.0" and words in error.problem
    assert str(error.value).startswith(f"{path}:3")


def test_bad_message_is_named_by_its_number(write: Write) -> None:
    error = mistake(write("a.jsonl", HELLO.replace("assistant", "gpt")))
    assert str(error.value).endswith("a.jsonl:1 message 2") and "assistant, system, tool, user" in error.remedy


def test_whole_characters_from_surrogate_pairs_are_fine(write: Write) -> None:
    assert rows(write("a.jsonl", '{"text": "\\ud83d\\ude42"}'))[0].text == "🙂"


@pytest.mark.parametrize(
    "content", [b'{"text": "ok"}\n{"text": "\xff"}\n', '{"text": "ok"}\n'.encode("utf-16"), b"\x80\x04pickle\n"]
)
def test_bytes_that_are_no_text(write: Write, content: bytes) -> None:
    path = write("a.jsonl", content)
    error = mistake(path)
    assert str(error.value) in (f"{path}:1", f"{path}:2") and "is not UTF-8 text" in error.problem
    assert "is not UTF-8 text" in mistake(write("a.txt", content)).problem


def test_format_is_obeyed(write: Write) -> None:
    both = write("a.jsonl", '{"text": "t", "messages": [{"role": "user", "content": "x"}]}')
    assert rows(both)[0].messages and rows(both, "text")[0].text == "t"
    assert '"messages" must be a list' in mistake(write("b.jsonl", '{"text": "t"}'), "chat").problem
    error = mistake(write("c.txt", "words"), "chat")
    assert (error.field, error.value) == ("data.train.0.format", "chat")


def test_file_that_may_not_be_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.jsonl", HELLO)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    error = mistake(path)
    assert error.problem == "cannot be read (Permission denied)"
