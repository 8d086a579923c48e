"""Hostile inputs, each against the real code: refused in clear words, with nothing run, read or shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from security.attempts import ATTEMPTS, Attempt
from security.ground import Bomb, GotThrough, Ground, ground
from security.table import BEGIN, END, PAGE, cell


@pytest.fixture(scope="module")
def place() -> Iterator[Ground]:
    with ground() as made:
        yield made


@pytest.mark.parametrize("one", ATTEMPTS, ids=lambda one: f"{one.area}: {one.tried}")
def test_it_is_refused(place: Ground, one: Attempt) -> None:
    place.run(one)


def test_what_gets_through_is_noticed(place: Ground) -> None:
    """The same judge, over code without protection."""
    import os
    import pickle

    def load(ground: Ground) -> str:
        pickle.loads(pickle.dumps(Bomb(ground.mark)))
        return "refused, it says, but it was run"

    def show(ground: Ground) -> str:
        return "the file says " + (ground.root / "secret.txt").read_text()

    for run, told in ((load, "its code was run"), (show, "the secret is in"), (lambda ground: "", "no clear words")):
        with pytest.raises(GotThrough, match=told):
            place.run(Attempt("x", "x", run))
    assert os.path.exists(place.root / "secret.txt")


def test_the_page_has_them_all() -> None:
    text = PAGE.read_text()
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    begins = [f"| {one.area} | {cell(one.tried)} | " for one in ATTEMPTS]
    assert len(ATTEMPTS) >= 40 and len(set(begins)) == len(begins)
    assert len(table) == len(begins), "PYTHONPATH=src:tests python -m security.table"
    for line, begin in zip(table, begins, strict=True):
        assert line.startswith(begin) and len(line) > len(begin) + 10, f"not as in the page: {begin}"
