"""Hostile inputs, each against the real code: refused in clear words, with nothing run, read or shown."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from typing import Any

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

    def load(ground: Ground) -> str:
        pickle.loads(pickle.dumps(Bomb(ground.mark)))
        return "refused, it says, but it was run"

    def show(ground: Ground) -> str:
        return "the file says " + (ground.root / "secret.txt").read_text()

    for run, told in ((load, "its code was run"), (show, "the secret is in"), (lambda ground: "", "no clear words")):
        with pytest.raises(GotThrough, match=told):
            place.run(Attempt("x", "x", run))


WEAKENED = [
    (
        "a link in a folder of texts to a file outside it",
        "shardwise.data.files",
        "_reject_outside_links",
        lambda *_: None,
    ),
    ("a host with a wrong token", "shardwise.launch.token", "same", lambda *_: True),
    ("a rank's log that is a link to a file elsewhere", "shardwise.watch.tail", "open_file", lambda p: p.open("rb")),
    ("93 KB of gzip that are one row of 96 MB", "shardwise.data.line_files", "MAX_ROW", 1 << 40),
    ("16 KB of zstd that are one row of 512 MB", "shardwise.data.streams", "ZSTD_STEP", 1 << 17),
    ("--env HF_TOKEN=… in launch.json", "shardwise.launch.command", "_without_secrets", lambda text, _: text),
    ("a pickle bomb hidden in a sound index", "shardwise.core.safe_pickle", "_Index", pickle.Unpickler),
    ("a key in the message of a failure (failure note, log)", "shardwise.launch.worker", "redact", str),
]


@pytest.mark.parametrize(("tried", "module", "name", "weak"), WEAKENED, ids=[w[0] for w in WEAKENED])
def test_without_its_protection_it_gets_through(
    tried: str, module: str, name: str, weak: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a ground of its own: who got through is still there afterwards."""
    monkeypatch.setattr(importlib.import_module(module), name, weak)
    (one,) = (one for one in ATTEMPTS if one.tried == tried)
    with ground() as own, pytest.raises(GotThrough):
        own.run(one)


def test_the_page_has_them_all() -> None:
    text = PAGE.read_text()
    table = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    begins = [f"| {one.area} | {cell(one.tried)} | " for one in ATTEMPTS]
    assert len(ATTEMPTS) >= 40 and len(set(begins)) == len(begins)
    assert len(table) == len(begins), "PYTHONPATH=src:tests python -m security.table"
    for line, begin in zip(table, begins, strict=True):
        assert line.startswith(begin) and len(line) > len(begin) + 10, f"not as in the page: {begin}"
