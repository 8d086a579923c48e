"""The measured tables of docs/comparison.md and docs/speed.md say what benchmarks/ holds."""

from __future__ import annotations

import json
import re
import sys

from support.pages import ROOT

sys.path.insert(0, str(ROOT / "docs/site"))
import comparing


def test_the_tables_are_those_of_the_benchmarks() -> None:
    page = comparing.PAGE.read_text()
    assert comparing.written(page) == page, "python docs/site/comparing.py"
    changed = page.replace("16,335", "17,335")
    assert changed != page and comparing.written(changed) == page


def test_the_page_on_speed_tells_the_same() -> None:
    """Tokens per second, MFU and memory of its table are cells of the file."""
    data = json.loads((ROOT / "benchmarks/peers_h200.json").read_text())
    cells = [cell for row in data.values() for cell in row.values()]
    known = {(f"{c['tokens_per_second']:,.0f}", f"{c['mfu']:.1%}", f"{c['gib']:.1f}") for c in cells}
    text = (ROOT / "docs/speed.md").read_text().partition("## Beside others")[2].partition("**What limits")[0]
    told = re.findall(r"\| ([\d,]+) \| ([\d.]+%) \| ([\d.]+) \|", text)
    assert len(told) > 20 and [row for row in told if row not in known] == []


def test_the_page_names_what_is_behind() -> None:
    """A row in which the best of ours is slower than the best other is told in words."""
    data = json.loads((ROOT / "benchmarks/peers_h200.json").read_text())
    words = comparing.PAGE.read_text().partition("Behind or level")[2].partition("##")[0]
    for name, row in data.items():
        others = [c["tokens_per_second"] for who, c in row.items() if not who.startswith("ours")]
        plain = row.get("ours")
        if plain and plain["tokens_per_second"] < max(others):
            assert name.partition("-")[0].upper() in words, name
