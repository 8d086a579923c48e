"""The bill says what was counted, at any width and to other tools, and complains when and only when it should."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from support.bills import HOSTILE, bill, source

from shardwise.config.schema import Source
from shardwise.data.statistics import (
    LENGTH_EDGES,
    DataStatistics,
    PackingStatistics,
    SourceStatistics,
    add_lengths,
    bin_range,
    coarse,
    length_bin,
    no_lengths,
    read_fates,
)
from shardwise.foresight.data_report.advice import problems, warnings
from shardwise.foresight.data_report.table import print_bill, print_notices, print_problems, sparkline
from shardwise.observe.tokenising import TokenisingProgress


def test_every_length_has_one_bin() -> None:
    lengths = [0, 1, 15, 16, 17, 18, 31, 32, 255, 256, 1 << 20, (1 << 31) - 1, 1 << 33]
    for length in lengths:
        low, high = bin_range(length_bin(length))
        assert low <= length <= high or length >= 1 << 31
        assert high - low <= length / 8, "an eighth at most, so that percentiles are near"
    histogram = no_lengths()
    add_lengths(histogram, np.array(lengths))
    expected = no_lengths()
    for length in lengths:
        expected[length_bin(length)] += 1
    assert histogram == expected and list(LENGTH_EDGES) == sorted(set(LENGTH_EDGES))


def test_histograms_of_chunks_add_up_and_percentiles_hold() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(int) + 1
    whole, parts = no_lengths(), no_lengths()
    add_lengths(whole, lengths)
    for chunk in np.array_split(lengths, 7):
        add_lengths(parts, chunk)
    assert whole == parts and sum(whole) == len(lengths)
    one = source(lengths=whole, longest=int(lengths.max()))
    for share in (0.01, 0.5, 0.9, 0.99, 0.999, 1.0):
        exact = np.sort(lengths)[math.ceil(share * len(lengths)) - 1]
        assert exact <= one.percentile(share) <= exact * 1.126
    assert one.percentile(1.0) == lengths.max() and source(lengths=no_lengths()).percentile(0.5) == 0


@pytest.mark.parametrize("bars", [1, 3, 8, 500])
def test_coarse_histograms_lose_nothing(bars: int) -> None:
    histogram = no_lengths()
    add_lengths(histogram, [5, 17, 17, 300, 90_000])
    groups = coarse(histogram, bars)
    assert len(groups) <= bars and sum(count for *_, count in groups) == 5
    assert groups[0][0] == 5 and groups[-1][1] >= 90_000
    assert all(a[1] + 1 == b[0] for a, b in pairwise(groups))
    assert coarse(no_lengths(), bars) == [] and sparkline(no_lengths(), bars) == ""


def test_a_single_row_is_seen_beside_a_million() -> None:
    histogram = no_lengths()
    add_lengths(histogram, [100] * 100_000 + [5000])
    line = sparkline(histogram, 20)
    assert line[0] == "█" and line[-1] == "▁" and set(line[1:-1]) == {" "}
    assert sparkline(histogram, 20, ascii_only=True).isascii()


def test_from_the_facts_of_a_store() -> None:
    histogram = no_lengths()
    add_lengths(histogram, [10, 20])
    facts = {
        "chunks": 1, "rows": 3, "documents": 2, "tokens": 30, "supervised": 12, "fates": {"dropped": 1},
        "lengths": histogram, "format": "chat", "reason": "because", "seconds": 0.5, "largest_token": 7,
    }  # fmt: skip
    settings = Source(path="a.jsonl", weight=2.0)
    one = SourceStatistics.from_facts(settings, "a", json.loads(json.dumps(facts)), held_out=1, cached=True)
    assert (one.name, one.path, one.rows, one.weight, one.held_out, one.cached) == ("a", "a.jsonl", 3, 2.0, 1, True)
    assert one.tokens_per_second == 60 and one.left_out == 1 and 20 <= one.percentile(1.0) <= 21
    assert SourceStatistics.from_facts(settings, "a", facts | {"longest": 20}).percentile(1.0) == 20


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("", "chat"), ("rows have messages", "chat: rows have messages"), ("chat, as set: …", "chat, as set: …")],
)
def test_the_format_is_named_once(reason: str, shown: str) -> None:
    assert source(reason=reason).understood == shown


SOURCE_KEYS = {
    "remarks", "columns", "temperature", "name", "path", "format", "reason", "rows", "documents", "tokens",
    "supervised", "held_out", "fates", "lengths", "longest", "weight", "epochs", "passes", "share", "seconds",
    "cached", "fates_file", "percentiles", "learned_share", "left_out", "tokens_per_second",
}  # fmt: skip


def test_the_json_keeps_its_keys() -> None:
    """Other tools read it: a key that goes or changes its meaning raises VERSION."""
    values = json.loads(json.dumps(bill(evaluation=(source("eval.jsonl"),)).to_json()))
    assert values["version"] == 1
    assert set(values) == {
        "version", "tokenizer", "template", "sequence_length", "loss_on", "over_length", "purpose", "train", "eval",
        "packing", "steps",
    }  # fmt: skip
    assert set(values["train"][0]) == set(values["eval"][0]) == SOURCE_KEYS
    assert (
        values["train"][0]["lengths"] == [[288, 303, 1000]] or sum(x[2] for x in values["train"][0]["lengths"]) == 1000
    )
    assert set(values["train"][0]["percentiles"]) == {"50", "90", "99", "99.9", "100"}
    assert set(values["packing"]) == {
        "on", "sequences", "documents", "tokens", "sequence_length", "window", "efficiency", "padding",
        "documents_per_sequence",
    }  # fmt: skip


def kinds(of: DataStatistics) -> set[tuple[str, str]]:
    return {(notice.kind, notice.source) for notice in warnings(of)}


def shared(**changes: Any) -> DataStatistics:
    return bill(source("a", share=0.5), source("b", **changes))


def packed(
    efficiency: float, length: int = 300, sequences: int = 200, window: int = 65536, on: bool = True
) -> DataStatistics:
    tokens = int(efficiency * sequences * 2048)
    return bill(packing=PackingStatistics(on, sequences, tokens // length, tokens, 2048, window))


def test_good_data_are_not_complained_about() -> None:
    assert warnings(bill()) == [] and problems(bill()) == []
    assert warnings(bill(evaluation=(source("eval.jsonl", rows=20),))) == []


@pytest.mark.parametrize(
    ("quiet", "loud", "kind", "name", "words"),
    [
        (bill(source(supervised=6_000)), bill(source(supervised=5_999)), "learned", "chat.jsonl", "2"),
        (bill(source(supervised=297_000)), bill(source(supervised=297_001)), "learned", "chat.jsonl", "99"),
        (bill(source(fates={"truncated": 50})), bill(source(fates={"truncated": 30, "dropped": 21})),
         "left out", "chat.jsonl", "5.1% of its rows"),
        (bill(source(fates={"filtered": 900, "split": 90})), bill(source(fates={"skipped": 51})),
         "left out", "chat.jsonl", "51 skipped"),
        (bill(source(fates={"duplicate": 200})), bill(source(fates={"duplicate": 101, "near duplicate": 100})),
         "duplicates", "chat.jsonl", "201 of 1,000"),
        (bill(source(longest=4096)), bill(source(longest=4097)), "long rows", "chat.jsonl", "99.9% of its rows fit"),
        (bill(source(length=4000)), bill(source(length=5000)), "long rows", "chat.jsonl", "5,000 would hold 99.9%"),
        (shared(share=0.01), shared(share=0.009), "share", "b", "0.9% of the mixture"),
        (packed(0.91), packed(0.89, length=1500), "packing", "", "sequence_length is short"),
        (packed(0.91), packed(0.5, sequences=3), "packing", "", "shorter data.sequence_length"),
        (packed(0.91), packed(0.89, window=8), "packing", "", "raise advanced.data.packing_window"),
        (packed(0.91, on=False), packed(0.3, on=False), "packing", "", "data.packing: true"),
        (bill(evaluation=(source("e", rows=20),)), bill(evaluation=(source("e", rows=19),)), "evaluation", "e", "19"),
        (bill(source(held_out=20)), bill(source(held_out=19)), "evaluation", "", "only 19 rows are held out"),
    ],
)  # fmt: skip
def test_each_warning_fires_beyond_its_threshold_only(
    quiet: DataStatistics, loud: DataStatistics, kind: str, name: str, words: str
) -> None:
    assert kind not in {found for found, _ in kinds(quiet)}
    assert kinds(loud) == {(kind, name)}
    assert words in warnings(loud)[0].text


def test_warnings_know_what_is_meant() -> None:
    """All of plain text is learned, loss_on: all learns all of a chat, and long text is split, not cut."""
    assert warnings(bill(source(supervised=300_000, format="text"))) == []
    assert warnings(bill(source(supervised=300_000), loss_on="all")) == []
    assert warnings(bill(source(longest=10**6), over_length="split")) == []
    assert warnings(bill(source(longest=10**6, format="text"), over_length=None)) == []
    assert kinds(bill(source(longest=10**6), over_length=None)) == {("long rows", "chat.jsonl")}


def test_problems_are_all_told() -> None:
    none = {"supervised": 0}
    found = problems(
        bill(
            source("a", **none),
            source("fine"),
            source("b", fates={"dropped": 1000}, longest=9000, **none),
            source("c", rows=0, **none),
            source("d", format="text", **none),
            evaluation=(source("e", **none),),
        )
    )
    fields = [error.field for error in found]
    assert fields == ["data.train.0", "data.train.2", "data.train.3", "data.train.4", "data.eval.0"]
    assert "1,000 rows would be learned" in found[0].problem and "loss_on: all" in found[0].remedy
    assert "(dropped)" in found[1].problem and "9,000" in found[1].remedy
    assert found[2].problem == "holds no rows" and "text" in found[3].remedy


def text_of(width: int, shown: DataStatistics, terminal: bool = True, encoding: str = "utf-8") -> str:
    class File(io.StringIO):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    console = Console(file=File(), width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    print_bill(shown, console)
    print_notices(warnings(shown), console)
    print_problems(problems(shown), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def nasty(tmp_path: Path) -> DataStatistics:
    file = tmp_path / "fates.jsonl"
    rows = [{"fate": "dropped", "where": f"/data/a.jsonl:{n}", "reason": "9,000 tokens"} for n in range(300)]
    rows += [{"fate": "skipped", "where": HOSTILE.replace("\ud83d", ""), "reason": HOSTILE}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"fate": "dropp')
    long = source("x" * 120, share=0.3, weight=3.0, passes=3.0)
    evil = source(HOSTILE, path=HOSTILE, reason=HOSTILE, share=0.001, supervised=0)
    return bill(source(fates={"dropped": 300, "skipped": 1}, fates_file=str(file)), long, evil, tokenizer=HOSTILE)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_bill_fits_the_terminal(tmp_path: Path, width: int) -> None:
    text = text_of(width, nasty(tmp_path))
    table = text[: text.index("packing:")]
    assert all(cell_len(line) <= width for line in table.splitlines())
    assert "300,000" in table and "40.0%" in table, "tokens and the learned share are shown at any width"
    lines = [line.replace("left out", "left-out").split() for line in table.splitlines() if line.startswith("source ")]
    heads = "rows documents tokens learned mixture left-out median 99% longest tokens/s"
    assert sorted(head for line in lines for head in line[1:]) == sorted(heads.split()), "none is missing at any width"
    assert (len(lines) == 1) == (width == 200)


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_in_the_data_acts_on_the_terminal(tmp_path: Path, terminal: bool) -> None:
    text = text_of(100, nasty(tmp_path), terminal)
    assert not {c for c in text if ord(c) < 32 and c != "\n"} and not {"\x7f", "\x9b", "\u202e", "\u2066"} & set(text)
    assert "<U+001B>" in text and "<U+202E>" in text and "[bold]x[/bold]" in text
    text.encode()


def test_fates_are_listed_by_row_with_the_file(tmp_path: Path) -> None:
    shown = nasty(tmp_path)
    text = text_of(10_000, shown, terminal=False)
    listed = [line for line in text.splitlines() if line.startswith(("  dropped: ", "  skipped: "))]
    assert len(listed) == 11 and listed[0] == "  dropped: /data/a.jsonl:0 (9,000 tokens)"
    assert listed[-1].startswith("  skipped: "), "a frequent fate does not hide a rare one"
    assert f"and 290 more; all of them in {shown.train[0].fates_file}" in text
    only = bill(source(fates={"dropped": 300}, fates_file=shown.train[0].fates_file))
    assert text_of(10_000, only).count("  dropped: ") == 20


def test_fates_are_read_no_further_than_needed(tmp_path: Path) -> None:
    file = tmp_path / "fates.jsonl"
    file.write_text('{"fate": "dropped", "where": "a:1"}\nnonsense\n[1]\n' + '{"fate": "split", "where": "a:2"}\n' * 9)
    assert read_fates(file, 5) == {"dropped": [("a:1", "")], "split": [("a:2", "")] * 5}
    assert read_fates(file, 5, {"dropped": 1}) == {"dropped": [("a:1", "")]}
    assert read_fates(tmp_path / "none", 5) == {}


def test_a_terminal_without_unicode() -> None:
    shown = bill(source("a", share=0.5), source("b", share=0.5))
    text = text_of(100, shown, encoding="ascii")
    assert text.isascii(), [c for c in text if not c.isascii()]


def progress(names: list[str], terminal: bool, width: int = 120) -> tuple[TokenisingProgress, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, legacy_windows=False)
    return TokenisingProgress(names, console, interval=0.0), file


def test_progress_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_PROGRESS", "plain")
    shown, file = progress(["a[bold]\x1b", "b"], terminal=False)
    with shown:
        shown.update(0, 100, 1000, 5000)
        shown.update(1, 100, None, 5000)
        shown.update(0, 1000, 1000, 50_000)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("a[bold]<U+001B>: 100 of 1,000 rows, ") and lines[0].endswith("5.0k tokens")
    assert lines[1].startswith("b: 100 rows, ") and lines[2].endswith("50.0k tokens, 0s left")
    quiet = TokenisingProgress(["a"], Console(file=file, force_terminal=False), interval=60)
    quiet.update(0, 1, 2, 3)
    quiet.update(0, 2, 2, 6)
    assert len(file.getvalue().splitlines()) == 3, "what is over before the first line was due needs none"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("SHARDWISE_PROGRESS", "live")
    shown, file = progress([f"source {n} [red]" + "y" * 50 for n in range(20)], terminal=True, width=width)
    with shown:
        for done in (10, 100):
            for index in range(20):
                shown.update(index, done, 100 if index % 2 else None, done * 7)
        assert shown._bars is not None
        rendered = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        rendered.print(shown._bars.get_renderable())
        lines = rendered.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert 0 < len(lines) <= 8 and all(cell_len(line) <= width for line in lines)
    assert "source" in lines[0] and (width < 80 or "[red]" in lines[0])
    assert file.getvalue()


def test_progress_can_be_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_PROGRESS", "off")
    shown, file = progress(["a"], terminal=True)
    with shown:
        shown.update(0, 1, 1, 1)
    assert file.getvalue() == ""


def test_cached_sources_have_no_speed() -> None:
    cached = bill(replace(source(), cached=True, seconds=0.0))
    assert cached.train[0].tokens_per_second is None and "cached" in text_of(200, cached)


def test_rows_that_are_read_one_at_a_time_are_not_told_to_be_packed() -> None:
    loose = PackingStatistics(False, 1000, 1000, 12_000, 64, 65536)
    classes = source(format="label", length=12, supervised=10)
    kinds = {purpose: [n.kind for n in warnings(bill(classes, packing=loose, purpose=purpose))] for purpose in (
        "causal", "seq2seq", "masked", "classify")}  # fmt: skip
    assert kinds == {"causal": ["learned", "packing"], "seq2seq": ["learned"], "masked": [], "classify": []}
