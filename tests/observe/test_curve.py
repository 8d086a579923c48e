"""The curves must show what the records say: their range, their gaps, and nothing a title smuggles in."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.curve import series_from, terminal_curve, write_curve_html


def _records(steps: int = 100) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 1.0 + 3.0 * math.exp(-step / 20)
        records.append({"kind": "train", "step": step, "loss": loss, "learning_rate": 1e-4, "grad_norm": 0.5})
        if step % 25 == 0:
            records.append({"kind": "eval", "step": step, "loss": loss + 0.1, "perplexity": math.exp(loss + 0.1)})
    return records


class _Page(HTMLParser):
    """Collects what the tests ask of a page, and insists that its elements nest."""

    void = ("meta", "line", "path", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def paths(self, name: str) -> list[str]:
        return [attrs["d"] or "" for tag, attrs in self.tags if tag == "path" and attrs["class"] == f"line {name}"]

    def data(self) -> dict[str, list[list[float | None]]]:
        found: dict[str, list[list[float | None]]] = json.loads(self.texts["script"][0])
        return found


def _page(tmp_path: Path, records: list[dict[str, Any]], title: str = "Run", subtitle: str = "") -> _Page:
    path = tmp_path / "out" / "curve.html"
    write_curve_html(path, records, title, subtitle)
    assert [entry.name for entry in path.parent.iterdir()] == ["curve.html"]
    return _Page(path.read_text(encoding="utf-8"))


def test_series_are_sorted_named_and_told_once_per_step() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "train", "step": 2, "loss": 9.0},
        {"kind": "train", "step": 1, "loss": 3.0},
        {"kind": "train", "step": 2, "loss": 2.0},
        {"kind": "train", "step": 3, "loss": None, "nonfinite": ["loss"]},
        {"kind": "eval", "step": 2, "loss": 2.5},
        {"kind": "note", "text": "saved"},
    ]
    series = series_from(records)
    assert list(series) == ["training loss", "evaluation loss"]
    assert series["training loss"][:2] == [(1, 3.0), (2, 2.0)]
    assert series["training loss"][2][0] == 3 and math.isnan(series["training loss"][2][1])
    assert series["evaluation loss"] == [(2, 2.5)]
    assert series_from([]) == {}


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(("width", "height"), [(72, 12), (40, 3), (120, 30)])
def test_terminal_curve_has_labels_and_keeps_its_size(width: int, height: int, ascii_only: bool) -> None:
    text = terminal_curve(series_from(_records()), width, height, ascii_only)
    lines = text.splitlines()
    plot = [line for line in lines if re.search(r"[│┤|+]", line) and "loss" not in line and "---" not in line]
    assert max(map(len, lines)) <= width and len(plot) == height
    assert plot[0].lstrip().startswith("3.854") and plot[-1].lstrip().startswith("1.020")
    assert lines[-1].split() == ["1", "step", "100"]
    assert "training loss 1.020" in text and "evaluation loss 1.120" in text
    assert text.isascii() == ascii_only


def test_terminal_curve_falls_where_the_loss_falls() -> None:
    lines = terminal_curve({"loss": [(0, 4.0), (100, 2.0)]}, ascii_only=True).splitlines()
    columns = [line.index("*") for line in lines[1:-2]]
    assert columns == sorted(columns) and columns[0] < columns[-1]


def test_terminal_curve_leaves_gaps_open() -> None:
    whole: list[tuple[int, float]] = [(step, 1.0 + step % 2) for step in range(60)]
    broken = [(step, math.nan if 20 <= step < 40 else value) for step, value in whole]

    def middle(points: list[tuple[int, float]]) -> str:
        rows = terminal_curve({"loss": points}, ascii_only=True).splitlines()[1:-2]
        return "".join(row[32:44] for row in rows).strip()

    assert middle(whole) and not middle(broken)


def test_terminal_curve_of_little_or_nothing() -> None:
    assert terminal_curve({}) == "(no loss recorded yet)"
    assert terminal_curve({"loss": []}) == "(no loss recorded yet)"
    assert terminal_curve({"loss": [(1, math.nan)]}) == "(no finite loss to plot)"
    one = terminal_curve({"loss": [(5, 2.5)]})
    assert "2.500 ┤" in one and one.count("•") == 1 and "step 5" in one
    assert "•" in terminal_curve({"loss": [(1, 1.0), (2, math.nan), (3, 2.0), (4, 2.5)]})
    assert "0.000 ┤" in terminal_curve({"loss": [(1, 0.0), (2, 0.0)]})


def test_page_holds_the_series(tmp_path: Path) -> None:
    records = _records()
    page = _page(tmp_path, records, "Run 7", "two devices")
    data = page.data()
    assert data["loss"] == [[step, float(f"{value:.6g}")] for step, value in series_from(records)["training loss"]]
    assert [step for step, _ in data["eval"]] == [25, 50, 75, 100]
    assert data["lr"][0] == [1, 1e-4] and data["grad"][0] == [1, 0.5]
    assert page.texts["title"] == ["Run 7"] and page.texts["h1"] == ["Run 7"] and "two devices" in page.texts["p"]
    for name in ("raw", "smooth", "eval", "lr", "grad", "grad raw"):
        (path,) = page.paths(name)
        assert path.count("M") == 1 and path.count("L") == (3 if name == "eval" else 99)
    dots = [attrs for tag, attrs in page.tags if tag == "circle" and attrs["class"] == "dot eval"]
    assert len(dots) == 4
    assert page.texts["h2"] == ["Loss", "Learning rate", "Gradient norm"]


def test_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = _page(tmp_path, _records())
    assert not [tag for tag, attrs in page.tags if tag in ("link", "img") or "src" in attrs or "href" in attrs]
    style = "".join(page.texts["style"])
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style


def test_page_is_readable_without_eyes_or_pointer(tmp_path: Path) -> None:
    page = _page(tmp_path, _records())
    charts = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(charts) == 3
    assert all(chart["role"] == "img" and "step 1 to 100" in (chart["aria-label"] or "") for chart in charts)
    assert [tag for tag, _ in page.tags].count("tr") == 101
    assert "3.854" in page.texts["td"] and "details" in [tag for tag, _ in page.tags]


def test_page_escapes_its_texts(tmp_path: Path) -> None:
    title = "<script>alert('x')</script> & $loss"
    page = _page(tmp_path, _records(), title, "</p><b>bold</b>")
    assert page.texts["h1"] == [title] and page.texts["title"] == [title]
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "b" not in [tag for tag, _ in page.tags]


def test_page_shows_gaps_and_says_so(tmp_path: Path) -> None:
    records = _records()
    for record in records:
        if record["step"] in (40, 41, 43):
            record["loss"] = None if record["step"] == 40 else math.nan
    page = _page(tmp_path, records)
    assert [value for step, value in page.data()["loss"] if step in (40, 41, 43)] == [None] * 3
    assert page.paths("smooth")[0].count("M") == 3
    lone = [attrs for tag, attrs in page.tags if tag == "circle" and attrs["class"] == "dot smooth"]
    assert len(lone) == 1
    assert any("not finite at 3 steps, first at step 40" in text for text in page.texts["p"])


@pytest.mark.parametrize("records", [[], _records(1), [{"kind": "train", "step": 1, "loss": None}]])
def test_page_of_little_or_nothing(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    page = _page(tmp_path, records)
    charts = [tag for tag, _ in page.tags if tag == "svg"]
    assert len(charts) + page.texts.get("p", []).count("Nothing recorded yet") == 3
    assert "nan" not in "".join(page.paths("smooth"))


def test_page_of_a_long_run_stays_small_and_keeps_its_spikes(tmp_path: Path) -> None:
    records = [{"kind": "train", "step": step, "loss": 9.0 if step == 3333 else 2.0} for step in range(1, 8001)]
    page = _page(tmp_path, records)
    loss = page.data()["loss"]
    assert len(loss) <= 1500 and [3333, 9.0] in loss
    assert len(page.texts["td"]) < 250


def test_smoothed_line_follows_a_steep_start_without_lag(tmp_path: Path) -> None:
    records = [{"kind": "train", "step": step, "loss": 100.0 - step} for step in range(1, 101)]
    smooth = {step: value for step, value in _page(tmp_path, records).data()["smooth"]}
    assert smooth[50] == pytest.approx(50.0, abs=0.01)


def _mixed(steps: int = 60) -> list[dict[str, Any]]:
    """Records of two sources, one of which is not in every step, and <b> tries to be markup."""
    records = _records(steps)
    for record in records:
        losses = {"chat": record["loss"] + 0.2}
        if record["step"] % 3 == 0 or record["kind"] == "eval":
            losses["<b>code"] = record["loss"] - 0.2
        record["losses"] = losses
    return records


def test_page_has_a_line_per_source(tmp_path: Path) -> None:
    page = _page(tmp_path, _mixed())
    assert page.texts["h2"] == ["Loss", "Loss by source", "Learning rate", "Gradient norm"]
    assert [len(page.paths(name)) for name in ("s0", "s0 held", "s1", "s1 held")] == [1] * 4
    assert page.paths("s0")[0].count("L") == 59
    assert page.paths("s1")[0].count("L") == 19 and page.paths("s1")[0].count("M") == 1, "no gaps where it was not in"
    named: Any = page.data()["sources"]
    assert [name for name, _ in named] == ["chat", "chat, evaluation", "<b>code", "<b>code, evaluation"]
    assert [step for step, _ in named[3][1]] == [25, 50]
    assert "b" not in [tag for tag, _ in page.tags]
    assert "<b>code" in page.texts["th"] and "<b>code" in page.texts["span"]


def test_page_of_one_source_has_nothing_of_sources(tmp_path: Path) -> None:
    page = _page(tmp_path, _records())
    assert "Loss by source" not in page.texts["h2"] and page.data()["sources"] == []
    assert ".s0" not in "".join(page.texts["style"])
