"""Gathers ahead, reductions left under way and blocks joined: what is begun when, and the same numbers bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import overlap
from support.ranks import run_ranks
from support.tiny import LLAMA, tiny_run, tokenizer_folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overlap")
    tokenizer_folder(folder / "tokenizer")
    return folder


def trained(shared: Path, ranks: int, **settings: Any) -> dict[str, Any]:
    model = {"config": LLAMA | {"num_hidden_layers": 4}, "tokenizer": str(shared / "tokenizer")}
    run = tiny_run(shared, model, **{"train__micro_batch_size": 12 // ranks} | settings)
    return run_ranks(overlap.steps, ranks, run)[0]


def before(events: list[str], block: str) -> int:
    """Gathers that were begun when a block's forward began."""
    return events[: events.index(block)].count("gather")


def test_units_are_gathered_ahead_and_nothing_else_changes(shared: Path) -> None:
    plain = trained(shared, 2, parallel__zero=3, parallel__prefetch=0)
    assert [before(plain["events"], n) for n in "0123"] == [2, 3, 4, 5], "the rest of the model, then block by block"
    assert not plain["left"]
    for ahead in (1, 2, 8):
        found = trained(shared, 2, parallel__zero=3, parallel__prefetch=ahead)
        assert [before(found["events"], n) for n in "0123"] == [min(5, 2 + n + ahead) for n in range(4)]
        assert found["events"].count("gather") == plain["events"].count("gather"), "each as often as before"
        assert max(found["left"]) == min(5, ahead), "as many reductions are under way as units are ahead"
        assert overlap.same(found, plain), ahead
