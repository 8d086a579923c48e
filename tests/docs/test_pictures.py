"""The pictures and tables of docs/concepts.md are what bytes.json draws, and bytes.json is what the code does."""

from __future__ import annotations

import copy
import json
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from support.pages import ROOT

sys.path.insert(0, str(ROOT / "docs/site"))
import drawing
import pictures


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pictures.DATA.read_text())
    return found


def test_they_are_drawn_from_the_measurements(data: dict[str, Any]) -> None:
    page = pictures.PAGE.read_text()
    drawn, tables = pictures.drawn(data, page)
    files = {path.stem: path.read_text() for path in pictures.PICTURES.glob("*.svg")}
    assert drawn == files and tables == page, "python docs/site/pictures.py draw"
    other = copy.deepcopy(data)
    other["figures"]["stages"]["stage 2"]["held"]["gradients"] *= 2
    again, changed = pictures.drawn(other, page)
    assert again["stages"] != files["stages"] and changed != page


def test_every_cell_is_there_and_adds_up(data: dict[str, Any]) -> None:
    assert {figure: list(cells) for figure, cells in data["figures"].items()} == {
        figure: list(cells) for figure, (_, _, _, cells) in pictures.FIGURES.items()
    }
    for cells in data["figures"].values():
        for cell in cells.values():
            assert sum(cell["held"].values()) == cell["peak"]
            assert set(cell["sent"]) <= set(drawing.SENT) and set(cell["held"]) <= set(drawing.HELD)
    assert {"date", "torch", "transformers", "shardwise"} <= set(data["made"])


def test_states_are_zero_s(data: dict[str, Any]) -> None:
    """Masters, moments and sums of gradients by the formulas, with our 4 bytes a gradient."""
    for stage, cell in enumerate(data["figures"]["stages"].values()):
        psi, ranks = cell["parameters"], cell["ranks"]
        held = cell["held"]
        assert held["parameters"] == pytest.approx(4 * psi / (ranks if stage else 1), rel=0.01)
        assert held["optimizer"] == pytest.approx(8 * psi / (ranks if stage else 1), rel=0.01)
        assert held["gradients"] == pytest.approx(4 * psi / (ranks if stage > 1 else 1), rel=0.01)
        if stage < 3:
            assert held["gathered"] == pytest.approx(2 * psi, rel=0.01)
        sent = {0: 8, 1: 6, 2: 10, 3: 16}[stage]
        assert sum(cell["sent"].values()) == pytest.approx(sent * psi, rel=0.01)


@pytest.mark.parametrize("name", sorted(pictures.FIGURES))
def test_nothing_leaves_the_picture(name: str) -> None:
    """Text and bars lie within it; every text is at least as dark (or light) as its ground asks for."""
    root = ElementTree.parse(pictures.PICTURES / f"{name}.svg").getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert width <= 480, "a phone shrinks it to unreadable letters otherwise"
    for node in root.iter():
        if "x" not in node.attrib:
            continue
        left, top = float(node.attrib["x"]), float(node.attrib["y"])
        wide = drawing.LETTER * len(node.text or "") if node.tag.endswith("text") else float(node.attrib["width"])
        shift = {"end": 1.0, "middle": 0.5}.get(node.attrib.get("text-anchor", ""), 0.0)
        assert left - shift * wide >= 0 and left + (1 - shift) * wide <= width + 1, node.text
        assert 0 <= top <= height


SLOW = [
    pytest.param(figure, label, marks=pytest.mark.slow)
    for figure, (_, _, _, cells) in pictures.FIGURES.items()
    for label in cells
    if label not in ("stage 1", "1 rank")
]


@pytest.mark.parametrize(("figure", "label"), [("stages", "stage 1"), *SLOW])
def test_measured_again(figure: str, label: str, data: dict[str, Any]) -> None:
    found, kept = pictures.measured(figure, label), data["figures"][figure][label]
    assert set(found["held"]) == set(kept["held"]) and set(found["sent"]) == set(kept["sent"])
    for part in ("held", "sent"):
        assert found[part] == {kind: pytest.approx(size, rel=0.01, abs=2**20) for kind, size in kept[part].items()}
    assert (found["host"], found["disk"]) == (
        pytest.approx(kept["host"], rel=0.01),
        pytest.approx(kept["disk"], rel=0.01),
    )
