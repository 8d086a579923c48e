"""`shardwise data` through the real command line: the bill, one row, the page, JSON, and every problem at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import cli
from support.tiny import tiny_run

from shardwise.cli import main as command_line

HOSTILE = "\x1b[2J[bold]x[/bold]\u202e"


def qa(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def rows(file: Path, *values: Any) -> str:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(file)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Thirty conversations and a text."""
    monkeypatch.chdir(tmp_path)
    chat = rows(tmp_path / "chat.jsonl", *(qa(f"question {n} {HOSTILE}", f"answer {n}") for n in range(30)))
    text = tmp_path / "notes.md"
    text.write_text("# Notes\n\n" + "Some words. " * 60)
    return cli.write_run(tmp_path, tiny_run(tmp_path, data__train=[chat, str(text)], data__over_length="split"))


def call(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[Any, str, str]:
    """The command in this process: exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        command_line.main(["data", *map(str, words)])
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err


def test_the_bill_and_two_examples_of_each_source(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, run)
    assert code == 0 and "error" not in err
    places = re.findall(r"^(\S+)  \S*?([^/\s]+)  [\d,]+ tokens, [\d,]+ learned", out, re.M)
    assert places == [("chat", "chat.jsonl:1"), ("chat", "chat.jsonl:16"), ("notes", "notes.md")]
    assert re.search(r"^chat +30 +30 ", out, re.M) and re.search(r"^all +31 ", out, re.M)
    assert "⟦answer 0<|im_end|>⟧" in out and "packing: " in out and "split over" in out
    assert "\x1b" not in out + err and "\u202e" not in out and "<U+001B>[2J[bold]x[/bold]<U+202E>" in out
    assert not (run.parent / "out").exists(), "nothing of the run itself is written"
    again = call(capsys, run)[1]
    assert again.partition("tokenizer ")[0] == out.partition("tokenizer ")[0], "the same rows every time"
    assert "cached" in again and call(capsys, run)[1] == again


@pytest.mark.parametrize(
    ("place", "shown"),
    [("chat.jsonl:7", "answer 6"), ("7", "answer 6"), ("notes.md", "# Notes"), ("notes.md:1", "# Notes")],
)
def test_one_row(run: Path, capsys: pytest.CaptureFixture[str], place: str, shown: str) -> None:
    code, out, _ = call(capsys, run, "--row", place)
    assert code == 0 and len(re.findall(r" tokens, \d+ learned", out)) == 1
    assert shown in out.replace("⟦", "").replace("<U+001B>", "")


@pytest.mark.parametrize("place", ["chat.jsonl:31", "99", "other.jsonl:1", "", ":", "chat.jsonl:0", "²"])
def test_a_row_that_is_not_there(run: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    code, _, err = call(capsys, run, "--row", place)
    assert code == 2 and err.splitlines()[-2].startswith("error: --row = ") and "FILE:LINE" in err


def test_overrides_and_no_preview(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, run, "data.packing=false", "--rows", "0")
    assert code == 0 and "no packing" in out and "learned tokens are" not in out


def test_json_and_nothing_else(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, run, "--json", "--html", run.parent / "sub" / "page.html")
    values = json.loads(out)
    assert code == 0 and out.isascii() and [s["name"] for s in values["train"]] == ["chat", "notes"]
    assert values["problems"] == [] and values["train"][0]["rows"] == 30
    assert values["packing"]["tokens"] == sum(s["tokens"] for s in values["train"])
    page = (run.parent / "sub" / "page.html").read_text()
    assert "What the model sees" in page and "answer 0" in page and "\u202e" not in page


def test_a_page_that_cannot_be_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, run, "--html", run.parent)
    assert code == 2 and "is a folder" in err
    code, _, err = call(capsys, run, "--html", "run.yaml/page.html")
    assert code == 2 and "cannot be written" in err


def test_a_source_that_teaches_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = rows(tmp_path / "good.jsonl", *(qa(f"q{n}", "a") for n in range(9)))
    long, longer = (rows(tmp_path / f"{n}.jsonl", *[qa("q", "many words " * n)] * 3) for n in (300, 400))
    run = cli.write_run(tmp_path, tiny_run(tmp_path, data__train=[good, long, longer], data__over_length="drop"))
    code, out, err = call(capsys, run)
    assert code == 2 and "error: data.train.1 = " in err and "none of its 3 rows has a token to learn" in err
    assert "error: data.train.2 = " in err and "(3 dropped)" in err and err.count("→") == 2
    code, out, err = call(capsys, run, "--json")
    assert code == 2 and [p["field"] for p in json.loads(out)["problems"]] == ["data.train.1", "data.train.2"]


def test_every_problem_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = rows(tmp_path / "good.jsonl", *(qa(f"q{n}", "a") for n in range(9)))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{not json\n")
    sources = [str(bad), good, str(tmp_path / "none.jsonl")]
    run = cli.write_run(tmp_path, tiny_run(tmp_path, data__train=sources, data__eval=str(tmp_path / "none.txt")))
    code, out, err = call(capsys, run)
    assert code == 2 and out == "" and err.count("error: ") == 3
    for field in ("data.train.0", "data.train.2", "data.eval.0"):
        assert f"error: {field} = " in err
    assert "Traceback" not in err
    code, out, _ = call(capsys, run, "--json")
    values = json.loads(out)
    assert code == 2 and values["train"] == [] and len(values["problems"]) == 3


def test_a_template_that_never_stops_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from support.chat import ENDLESS, chat_tokenizer

    chat_tokenizer(ENDLESS).save_pretrained(tmp_path / "endless")
    good = rows(tmp_path / "good.jsonl", *(qa(f"q{n}", "a") for n in range(9)))
    values = tiny_run(tmp_path, data__train=good)
    values["model"]["tokenizer"] = str(tmp_path / "endless")
    code, _, err = call(capsys, cli.write_run(tmp_path, values))
    assert code == 2 and "would never learn to stop" in err


def test_mistakes_in_the_settings_of_all_sources(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "data.train=[{path: a.jsonl, format: chatt, weight: -1}, {path: b.jsonl, nmae: 3}]"
    code, out, err = call(capsys, run, wrong, "--json")
    fields = ["data.train.0.format", "data.train.0.weight", "data.train.1.nmae"]
    assert code == 2 and [p["field"] for p in json.loads(out)["problems"]] == fields
    assert err.count("error: ") == 3 and "did you mean chat?" in err and "name" in err
    code, out, err = call(capsys, run, wrong, "train.lr=3")
    assert code == 2 and out == "" and "train.lr" in err, "a mistake elsewhere is the first to be told"


def test_rows_of_tables_and_of_one_long_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    values = [qa(f"q{n}", f"cell {n}") for n in range(5)]
    parquet.write_table(pa.Table.from_pylist(values), run.parent / "t.parquet")
    (run.parent / "one.json").write_text(json.dumps(values))
    for name in ("t.parquet", "one.json"):
        for place in (f"{name}:3", run.parent / f"{name}:3", f"{name} row 3"):
            code, out, _ = call(capsys, run, f"data.train={name}", "--row", place)
            assert code == 0 and "⟦cell 2" in out and f"{name} row 3" in out
    code, out, _ = call(capsys, run, "--row", run.parent / "chat.jsonl:7")
    assert code == 0 and "answer 6" in out


def test_ctrl_c_says_that_it_stopped(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.foresight.data_report.command.survey", interrupted)
    code, out, err = call(capsys, run)
    assert code == 130 and out == "" and err.startswith("stopped; what was tokenised so far is kept")


def test_a_name_with_brackets(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "chat.jsonl").rename(run.parent / "chat[1].jsonl")
    code, out, _ = call(capsys, run, "data.train=chat[1].jsonl", "--rows", "0")
    assert code == 0 and "chat[1]  chat: the rows have messages" in out


def test_columns_that_one_source_lacks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scored = rows(run.parent / "scored.jsonl", *({"text": f"scored {n}", "score": n} for n in range(10)))
    plain = rows(run.parent / "plain.jsonl", *({"text": f"plain {n}"} for n in range(10)))
    sources = f"data.train=[{scored}, {plain}]"
    code, _, err = call(capsys, run, sources, 'data.refine={filter: "score > 7"}')
    assert code == 2 and "plain.jsonl has a column score" in err and "score is None or … keeps their rows" in err
    code, out, _ = call(capsys, run, sources, 'data.refine={filter: "score is None or score > 7"}')
    assert code == 0 and "it has no score, which data.refine.filter takes for None" in out
    assert "scored: data.refine leaves out 80.0% of its rows (8 filtered)" in out


def test_epochs_and_weight_and_temperature(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = "data.train=[{path: chat.jsonl, epochs: 2, weight: 3}, {path: notes.md}, {path: run.yaml, format: text}]"
    code, out, _ = call(capsys, run, sources, "data.temperature=3")
    assert code == 0 and "epochs 2: each row comes up 2 times" in out and "weight 1, temperature 3" not in out
    assert "chat: has both epochs (2) and weight (3): epochs decides" in out
    sources = "data.train=[{path: chat.jsonl}, {path: notes.md}]"
    assert "weight 1, temperature 3: each row comes up" in call(capsys, run, sources, "data.temperature=3")[1]


def test_empty_files_and_single_rows_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "chat2.jsonl").touch()
    code, out, _ = call(capsys, run, "data.train=[chat*.jsonl, notes.md]", "data.eval=10%")
    assert code == 0 and "1 file is empty (chat2.jsonl)" in out
    assert "notes: has a single row, which is trained on; nothing of it is held out" in out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0 and "--html" in out and "shardwise data run.yaml" in out


def test_a_pipe_that_lacks_most_characters(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, since the encoding is that of the process."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    (run.parent / "chat.jsonl").write_text(json.dumps(qa("日本 é", "👍")) + "\n")
    code, out, err = cli.command("data", run)
    assert code == 0 and out.isascii() and "Traceback" not in err, err
    assert "[[\\U0001f44d<|im_end|>]]" in out and "\\u65e5\\u672c" in out
