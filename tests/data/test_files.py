"""Which files a source is, how they are cut into chunks, and what is said where it cannot be done."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.sources import FIELD, raw_rows, take

from shardwise.config.schema import Source
from shardwise.core.errors import UserError
from shardwise.data import jsonfile, line_files, tables
from shardwise.data.examples import BadRow, Raw
from shardwise.data.files import chunk_tasks, content_digest, count_rows, read_chunk, source_files, source_notes
from shardwise.data.line_files import CHUNK_BYTES, CHUNK_ROWS

Write = Callable[..., str]
HELLO = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "né 🙂"}]}'


def mistake(path: str, **settings: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        take(path, **settings)
    return caught.value


def values(path: str, **settings: Any) -> list[Any]:
    return [row.value if isinstance(row, Raw) else row.problem for row in raw_rows(path, **settings)]


# Lines


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("last", ["", "NEWLINE"], ids=["open", "closed"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_of_any_editor(write: Write, bom: bytes, newline: str, last: str, suffix: str) -> None:
    text = newline.join([HELLO, "", '{"text": "a\\r\\nb"}', "   ", HELLO]) + last.replace("NEWLINE", newline)
    content = bom + text.encode()
    path = write(f"a.jsonl{suffix}", gzip.compress(content) if suffix else content)
    found = raw_rows(path)
    assert [r.where for r in found] == [f"{path}:1", f"{path}:3", f"{path}:5"]  # lines as an editor counts them
    assert [r.number for r in found] == [0, 1, 2]
    assert [r.value for r in found if isinstance(r, Raw)] == [json.loads(HELLO), {"text": "a\r\nb"}, json.loads(HELLO)]
    assert count_rows(Source(path=path), FIELD) == 3


def test_line_separators_inside_a_row_do_not_split_it(write: Write) -> None:
    path = write("a.jsonl", '{"text": "a\u2028b\u0085c\u000bd"}\n'.replace("\u000b", "\\u000b"))
    assert values(path) == [{"text": "a\u2028b\u0085c\u000bd"}]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("read", [16, 333, 4 << 20])
def test_chunks_do_not_depend_on_how_the_file_is_read(
    write: Write, monkeypatch: pytest.MonkeyPatch, suffix: str, read: int
) -> None:
    monkeypatch.setattr(line_files, "CHUNK_ROWS", 7)
    monkeypatch.setattr(line_files, "CHUNK_BYTES", 200)
    monkeypatch.setattr(line_files, "MAX_ROW", 400)
    monkeypatch.setattr(line_files, "READ", read)
    rows, lines = [], []
    for index in range(60):
        size = 500 if index in (20, 59) else 300 if index in (0, 30) else index % 5
        rows.append({"n": index, "x": "é" * (size // 2)})
        lines.append(json.dumps(rows[-1], ensure_ascii=False))
        lines += [""] * (index % 3 == 0) + [" \r"] * (index % 7 == 0)
    content = "\n".join(lines).encode()
    path = write(f"a.jsonl{suffix}", gzip.compress(content) if suffix else content)
    tasks = list(chunk_tasks(Source(path=path), FIELD))
    found = [row for task in tasks for row in read_chunk(task)]
    assert [r.number for r in found] == list(range(60)) and sum(t.rows for t in tasks) == 60
    for row in found:
        text = json.dumps(rows[row.number], ensure_ascii=False)
        assert row.where == f"{path}:{lines.index(text) + 1}"
        if row.number in (20, 59):
            assert isinstance(row, BadRow) and "longer than" in row.problem
        else:
            assert isinstance(row, Raw) and row.value == rows[row.number]
    sizes = [task.rows for task in tasks]
    assert max(sizes) <= 7
    monkeypatch.setattr(line_files, "READ", 1 << 20)
    assert [t.rows for t in chunk_tasks(Source(path=path), FIELD)] == sizes


def test_chunks_hold_so_many_rows_and_bytes(write: Write) -> None:
    path = write("a.jsonl", [{"text": "x"}] * (CHUNK_ROWS + 5) + [{"text": "y" * (CHUNK_BYTES // 3)}] * 4)
    tasks = list(chunk_tasks(Source(path=path), FIELD))
    assert [t.rows for t in tasks] == [CHUNK_ROWS, 7, 2] and [t.first_row for t in tasks] == [0, 2048, 2055]


@pytest.mark.parametrize("kind", ["jsonl", "json", "txt", "csv"])
def test_a_row_of_100_mb_is_refused_before_it_is_parsed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 times as long as a row may be; what is held are a few rows of that length."""
    row = 2 << 20
    for module in (line_files, jsonfile):
        monkeypatch.setattr(module, "MAX_ROW", row)
        monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 17)  # less than a row may have, as it is
        monkeypatch.setattr(module, "READ", 1 << 17)
    path = tmp_path / f"big.{kind}"
    before, after = {
        "jsonl": ('{"text": "first"}\n{"text": "', '"}\n{"text": "last"}\n'),
        "json": ('[{"text": "first"},\n{"text": "', '"},\n{"text": "last"}]'),
        "txt": ("", ""),
        "csv": ("text,n\nfirst,1\n", "\nlast,2\n"),
    }[kind]
    with path.open("w") as file:
        file.write(before)
        for _ in range(100):
            file.write("x" * (1 << 20))
        file.write(after)
    tracemalloc.start()
    try:
        if kind == "csv":
            assert "longer than 2 MB" in (error := mistake(str(path))).problem and error.value == f"{path}:3"
        else:
            rows = [row for task in chunk_tasks(Source(path=str(path)), FIELD) for row in read_chunk(task)]
            bad = rows.pop(len(rows) // 2)
            assert isinstance(bad, BadRow) and "2 MB" in bad.problem
            assert bad.where == (str(path) if kind == "txt" else f"{path}:2")
            assert [r.value["text"] for r in rows if isinstance(r, Raw)] == (["first", "last"] if rows else [])
        taken = tracemalloc.get_traced_memory()[1]
        print(f"\n{kind}: {taken / row:.1f} rows of the longest that is read, of 50 that the file has")
        assert taken < 12 * row
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "arrow"])
def test_memory_does_not_grow_with_the_source(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of making all chunks, of a source and of one ten times as large."""
    monkeypatch.setattr(line_files, "CHUNK_BYTES", 1 << 17)
    monkeypatch.setattr(tables, "CHUNK_BYTES", 1 << 17)
    monkeypatch.setattr(jsonfile, "CHUNK_BYTES", 1 << 17)
    monkeypatch.setattr(line_files, "READ", 1 << 17)
    monkeypatch.setattr(jsonfile, "READ", 1 << 17)
    rows = [{"text": f"{i} " + "word " * 400} for i in range(500)]
    peaks = []
    pa = pytest.importorskip("pyarrow") if kind in ("parquet", "arrow") else None
    for times in (20, 200) if kind == "parquet" else (2, 20):  # Parquet's own buffers fill up within the first 20 MB
        path = tmp_path / f"{times}.{kind}"
        if pa is not None:
            import pyarrow.parquet

            table = pa.Table.from_pylist(rows * times)
            if kind == "parquet":
                pyarrow.parquet.write_table(table, path)  # one row group
            else:
                with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table, max_chunksize=100)
            del table
        else:
            lines = {"json": ",", "csv": ""}.get(kind, "").join(
                (row["text"] if kind == "csv" else json.dumps(row)) + "\n" for row in rows * times
            )
            text = {"json": f"[{lines}]", "csv": f"text\n{lines}"}.get(kind, lines).encode()
            path.write_bytes(gzip.compress(text, 1) if kind.endswith("gz") else text)
        tracemalloc.start()
        count = buffers = 0
        for task in chunk_tasks(Source(path=str(path)), FIELD):
            count += task.rows
            buffers = max(buffers, pa.total_allocated_bytes() if pa else 0)  # which tracemalloc does not see
        peaks.append(tracemalloc.get_traced_memory()[1] + buffers)
        tracemalloc.stop()
        assert count == 500 * times
    print(f"\n{kind}: {peaks[0] >> 10} and {peaks[1] >> 10} KiB, {peaks[1] / peaks[0]:.2f} times as much")
    assert peaks[1] < 3.3 * peaks[0]


# Which files


def test_globs_folders_and_single_files(write: Write, tmp_path: Path) -> None:
    for name in ("d/b.jsonl", "d/a.jsonl", "d/deep/c.csv", "d/e.ndjson", "d/skip.bin", "d/skip2.BIN", "d/noext"):
        write(name, HELLO if "json" in name else "text\nwords")
    for name in ("d/.hidden.jsonl", "d/.git/x.jsonl", "d/README.md"):
        write(name, HELLO)
    (tmp_path / "d/folder.csv").mkdir()

    def names(path: str) -> list[str]:
        return [str(f.relative_to(tmp_path / "d")) for f in source_files(Source(path=path), FIELD)]

    assert names(f"{tmp_path}/d") == ["a.jsonl", "b.jsonl", "deep/c.csv", "e.ndjson"]
    assert names(f"{tmp_path}/d/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/d/**/*.csv") == ["deep/c.csv"]
    assert names(f"{tmp_path}/d/[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/d/b.jsonl") == ["b.jsonl"]
    aside, cards = source_notes(Source(path=f"{tmp_path}/d"), FIELD)
    assert "3 files of other kinds are left aside (2 .bin, 1 noext)" in aside and "README.md" in cards
    assert [r.number for r in raw_rows(f"{tmp_path}/d/*.jsonl")] == [0, 1]


def test_a_folder_of_code_is_a_row_per_file(write: Write, tmp_path: Path) -> None:
    for name in ("a.py", "b/c.rs", "b/README.md", "Makefile", "train/x.py", "test/y.py"):
        write(f"src/{name}", name)
    write("src/empty.py", "")
    taken = take(f"{tmp_path}/src")
    assert [e.text for e in taken.examples] == ["Makefile", "a.py", "b/README.md", "b/c.rs", "test/y.py", "train/x.py"]
    assert taken.detected and taken.detected.format == "text"


def test_mixed_folders_are_refused(write: Write, tmp_path: Path) -> None:
    write("d/a.jsonl", HELLO)
    write("d/story.txt", "words")
    error = mistake(f"{tmp_path}/d")
    assert "both files of rows (a.jsonl, …) and texts (story.txt, …)" in error.problem and "*.jsonl" in error.remedy


def test_folders_with_splits_are_not_taken_as_a_whole(write: Write, tmp_path: Path) -> None:
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl"):
        write(f"d/data/{name}", HELLO)
    error = mistake(f"{tmp_path}/d")
    assert "several splits: test (1), train (2)" in error.problem
    assert len(take(f"{tmp_path}/d", split="train").examples) == 2
    assert len(take(f"{tmp_path}/d", split="test").examples) == 1
    assert mistake(f"{tmp_path}/d", split="dev").field == f"{FIELD}.split"


def test_settings_without_effect_are_refused(write: Write) -> None:
    path = write("a.jsonl", HELLO)
    for name, value in (("split", "train"), ("subset", "x"), ("streaming", True)):
        error = mistake(path, **{name: value})
        assert error.field == f"{FIELD}.{name}" and "no meaning" in error.problem
    assert mistake(write("a.json", f"[{HELLO}]"), split="train").field == f"{FIELD}.split"


def test_a_file_whose_name_looks_like_a_pattern(write: Write) -> None:
    assert len(raw_rows(write("data[1].jsonl", HELLO))) == 1


def test_home_is_expanded(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.jsonl", HELLO)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(raw_rows("~/a.jsonl")) == len(raw_rows("~/*.jsonl")) == 1


def test_files_that_are_not_there(tmp_path: Path, write: Write) -> None:
    write("a.xls", "x")
    (tmp_path / "empty").mkdir()
    for name, problem in {
        "absent.jsonl": "there is no such file",
        "*.jsonl": "matches no",
        "empty": "matches no",
        "a.xls": "files of kind .xls are not understood",
        "absent": "there is no such file",
    }.items():
        error = mistake(f"{tmp_path}/{name}")
        assert error.field == FIELD and error.value == f"{tmp_path}/{name}" and problem in error.problem


def test_file_that_may_not_be_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.jsonl", HELLO)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert mistake(path).problem == "cannot be read (Permission denied)"
    with pytest.raises(UserError, match="Permission denied"):
        content_digest(Source(path=path), FIELD)


def test_a_file_that_vanishes_before_the_worker_reads_it(write: Write) -> None:
    path = write("a.jsonl", HELLO)
    (task,) = chunk_tasks(Source(path=path), FIELD)
    Path(path).unlink()
    with pytest.raises(UserError) as caught:
        list(read_chunk(task))
    assert caught.value.field == FIELD and caught.value.value == path


def test_digest_follows_the_bytes(write: Write, tmp_path: Path) -> None:
    def digest() -> str:
        return content_digest(Source(path=f"{tmp_path}/d"), FIELD)

    write("d/a.jsonl", HELLO)
    write("d/b.jsonl", HELLO)
    first = digest()
    write("d/skip.bin", "x")
    assert digest() == first
    write("d/b.jsonl", HELLO + " ")
    assert digest() != first


# CSV


def test_csv_lines_are_those_at_which_records_begin(write: Write) -> None:
    path = write("a.csv", b'\xef\xbb\xbfprompt,completion\r\n"a\r\nb",c\r\n\r\nd,"e\n\n"\r\nf,g\r\n')
    rows = raw_rows(path)
    assert [r.where.rpartition(":")[2] for r in rows] == ["2", "5", "8"]
    assert [r.value for r in rows if isinstance(r, Raw)] == [
        {"prompt": "a\r\nb", "completion": "c"},
        {"prompt": "d", "completion": "e\n\n"},
        {"prompt": "f", "completion": "g"},
    ]


def test_large_csv_fields(write: Write) -> None:
    assert values(write("a.csv", "text\n" + "x" * 300_000 + "\n")) == [{"text": "x" * 300_000}]


@pytest.mark.parametrize("header", ["text,text", ",,", "x" * 200 + ",y"])
def test_csv_needs_a_header(write: Write, header: str) -> None:
    assert "must name the columns" in mistake(write("a.csv", f"{header}\n1,2\n")).problem


# JSON


@pytest.mark.parametrize("read", [1, 2, 5, 64, 1 << 20])
def test_json_is_cut_rightly_wherever_blocks_end(write: Write, monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    monkeypatch.setattr(jsonfile, "READ", read)
    deep: Any = "x"
    for _ in range(12):
        deep = [{"d": deep}, '"\\{[']
    rows = [{"a": 'q"\\', "b": [1, {"c": None}]}, {"é\u2028": "}]"}, {"deep": deep}, {}, {"n": -1.5e9, "t": True}]
    for indent in (None, 2):
        for wrap, settings in ((False, {}), (True, {"split": "train"})):
            content: Any = {"k": [{"z": 1}], "train": rows, "v": 2} if wrap else rows
            path = write("a.json", json.dumps(content, indent=indent, ensure_ascii=False))
            assert values(path, **settings) == rows


def test_which_list_of_a_json_object_is_taken_is_said(write: Write) -> None:
    path = write("a.json", json.dumps({"version": 2, "rows": [{"text": "a"}], "license": "x"}))
    assert values(path) == [{"text": "a"}]
    assert source_notes(Source(path=path), FIELD) == [f'{path}: the rows under "rows" are taken, not version, license']
    path = write("b.json", json.dumps({"train": [{"text": "a"}], "test": [{"text": "b"}]}))
    assert values(path) == [{"text": "a"}] and "not test" in source_notes(Source(path=path), FIELD)[0]
    path = write("c.json", json.dumps({"text": ["a", "b"], "n": [1]}))
    assert "its columns (text, n) are not of one length" in mistake(path).problem


# Tables and datasets


def test_parquet_rows_are_numbered_through(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = pa.table({"text": [f"{i}" for i in range(5000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    rows = raw_rows(str(tmp_path / "a.parquet"))
    assert [r.value["text"] for r in rows if isinstance(r, Raw)] == [f"{i}" for i in range(5000)]
    assert rows[4999].where == f"{tmp_path}/a.parquet row 5000" and rows[4999].number == 4999
    assert count_rows(Source(path=str(tmp_path / "a.parquet")), FIELD) == 5000


def test_wide_rows_of_tables_are_divided(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": ["x" * (3 << 20)] * 7})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    tasks = list(chunk_tasks(Source(path=str(tmp_path / "a.arrow")), FIELD))
    assert sum(t.rows for t in tasks) == 7 and max(t.rows for t in tasks) <= 2


def test_a_value_that_python_cannot_hold_is_one_bad_row(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    broken = pa.array([b"a", b"\xff", b"c"]).view(pa.binary())
    text = pa.StringArray.from_buffers(3, *broken.buffers()[1:])
    pyarrow.parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    rows = raw_rows(str(tmp_path / "a.parquet"))
    assert [isinstance(r, BadRow) for r in rows] == [False, True, False]
    assert rows[1].where.endswith("a.parquet row 2") and "cannot be read" in rows[1].problem  # type: ignore[union-attr]


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


def test_saved_datasets(tmp_path: Path, datasets: Any) -> None:
    rows = [{"text": f"{i}"} for i in range(10)]
    whole = datasets.Dataset.from_list(rows)
    whole.shuffle(seed=1).select(range(5)).save_to_disk(tmp_path / "one")
    taken = take(f"{tmp_path}/one")
    assert [e.text for e in taken.examples] == whole.shuffle(seed=1)["text"][:5]
    assert taken.examples[0].where.endswith(".arrow row 1")
    both = datasets.DatasetDict(train=whole, test=whole.select(range(3)))
    both.save_to_disk(tmp_path / "both", num_shards={"train": 3, "test": 1})
    assert [e.text for e in take(f"{tmp_path}/both").examples] == [f"{i}" for i in range(10)]
    assert len(take(f"{tmp_path}/both", split="test").examples) == 3
    assert "train is taken" in source_notes(Source(path=f"{tmp_path}/both"), FIELD)[0]
    assert count_rows(Source(path=f"{tmp_path}/both"), FIELD) == 10
    error = mistake(f"{tmp_path}/both", split="dev")
    assert error.field == f"{FIELD}.split" and "train, test" in error.problem
    assert mistake(f"{tmp_path}/one", split="train").field == f"{FIELD}.split"
    next((tmp_path / "one").glob("*.arrow")).unlink()
    assert "lacks this file" in mistake(f"{tmp_path}/one").problem


def test_hub_datasets(datasets: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    rows = [{"prompt": f"{i}", "completion": "c"} for i in range(CHUNK_ROWS + 3)]

    def load(name: str, subset: Any, split: str, streaming: bool) -> Any:
        asked.append((name, subset, split, streaming))
        whole = datasets.Dataset.from_list(rows)
        return whole.to_iterable_dataset() if streaming else whole

    monkeypatch.setattr(datasets, "load_dataset", load)
    for streaming in (False, True):
        source = Source(path="hf:a/b", subset="s", split="dev", streaming=streaming)
        tasks = list(chunk_tasks(source, FIELD))
        found = [row for task in tasks for row in read_chunk(task)]
        assert [t.rows for t in tasks] == [CHUNK_ROWS, 3]
        assert [r.value for r in found if isinstance(r, Raw)] == rows
        assert found[-1].where == f"hf:a/b s dev row {CHUNK_ROWS + 3}"
        assert asked[-1] == ("a/b", "s", "dev", streaming)
        assert count_rows(source, FIELD) == (None if streaming else CHUNK_ROWS + 3)
        assert source_files(source, FIELD) == []
    assert content_digest(Source(path="hf:a/b"), FIELD)
    monkeypatch.chdir(tmp_path)
    assert take("a/b").detected and asked[-1] == ("a/b", None, "train", False)
    (tmp_path / "a/b").mkdir(parents=True)
    assert "matches no file" in mistake("a/b").problem  # a path that is there is never looked up on the hub


@pytest.mark.parametrize(
    ("raised", "field", "words"),
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), FIELD, "the hub is not reachable"),
        (ValueError("Unknown split \"dev\". Should be one of ['train']."), f"{FIELD}.split", "Should be one of"),
        (ValueError("Config name is missing. Pick one of x, y"), f"{FIELD}.subset", "x, y"),
        (RuntimeError("Dataset scripts are no longer supported"), FIELD, "does not load"),
    ],
)
def test_hub_mistakes(
    datasets: Any, monkeypatch: pytest.MonkeyPatch, raised: Exception, field: str, words: str
) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", load)
    error = mistake("hf:a/b", split="dev")
    assert error.field == field and words in error.problem and error.remedy


def test_hub_without_a_network(datasets: Any) -> None:
    code = (
        "from support.sources import take\nfrom shardwise.core.errors import UserError\n"
        "try: take('nobody/nothing')\nexcept UserError as error: print(error)"
    )
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=offline, timeout=120)
    assert "there is no such path here" in done.stdout and "not reachable" in done.stdout, done.stderr


def test_libraries_that_are_absent(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"pyarrow": write("a.parquet", b"PAR1"), "zstandard": write("a.jsonl.zst", b""), "datasets": "hf:a/b"}
    for library, path in paths.items():
        monkeypatch.setitem(sys.modules, library, None)
        error = mistake(path)
        assert "needs" in error.problem and error.remedy == f"pip install {library}"


def test_links_within_a_folder_and_in_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "datasets--x/snapshots/1/data", tmp_path / "datasets--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text("from a blob")
    (snapshot / "a.txt").symlink_to(blobs / "abc")
    (snapshot / "b.txt").symlink_to(snapshot / "a.txt")
    whole = tmp_path / "linked"
    whole.symlink_to(snapshot)
    for path in (snapshot, whole, snapshot / "*.txt"):
        found = source_files(Source(path=str(path)), "data.train.0")
        assert [file.name for file in found] == ["a.txt", "b.txt"], path
