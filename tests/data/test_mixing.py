"""Shares are those asked for, to the document; the order is decided from left to right by seed and contents alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stores import documents, loader, places, stream, write_store

from shardwise.config.schema import Source
from shardwise.core.errors import UserError
from shardwise.data.loader import Loader
from shardwise.data.mixing import Mixture, SourceStream, passes_per_epoch, source_names
from shardwise.data.store import TokenStore, fail, finish, write_chunk


def taken(source: Loader, epochs: int, after: int = 0) -> Counter[int]:
    """Documents of each source in some epochs."""
    first = sum(source.epoch_sequences(e) for e in range(after))
    count = sum(source.epoch_sequences(e) for e in range(after, after + epochs))
    return Counter(int(d) for s in source.sequences(first, count) for d in s["source"])


def given(rows: list[int | None], weights: list[float], epochs: list[float | None]) -> list[SourceStream]:
    store = TokenStore(Path("nowhere"))
    return [SourceStream(f"s{i}", store, *values) for i, values in enumerate(zip(rows, weights, epochs, strict=True))]


class TestPassesPerEpoch:
    def test_alike_means_once_each_and_needs_no_counts(self) -> None:
        for weight in (1.0, 0.1, 7.0):
            assert passes_per_epoch(given([None, 5], [weight, weight], [None, None])) == [1, 1]
        assert passes_per_epoch(given([None], [3.0], [None]), temperature=5.0) == [1]

    def test_weights_keep_the_rows_of_an_epoch(self) -> None:
        rates = passes_per_epoch(given([300, 100], [1.0, 3.0], [None, None]))
        assert rates == [Fraction(2, 3), 2]  # 200 rows each
        assert rates[0] * 300 + rates[1] * 100 == 400

    def test_epochs_stand_apart(self) -> None:
        rates = passes_per_epoch(given([300, 100, None], [1.0, 3.0, 1.0], [None, None, 0.1]))
        assert rates == [Fraction(2, 3), 2, Fraction(1, 10)]

    def test_temperature(self) -> None:
        rates = passes_per_epoch(given([900, 100], [1.0, 1.0], [None, None]), temperature=2.0)
        assert [float(r) for r in rates] == pytest.approx([0.75 * 1000 / 900, 0.25 * 1000 / 100])
        hot = passes_per_epoch(given([900, 100], [1.0, 1.0], [None, None]), temperature=1e9)
        assert [float(r * n) for r, n in zip(hot, (900, 100), strict=True)] == pytest.approx([500, 500], rel=1e-6)

    def test_equal_sizes_are_whole_passes_at_any_temperature(self) -> None:
        assert passes_per_epoch(given([7, 7, 7], [1.0] * 3, [None] * 3), temperature=3.0) == [1, 1, 1]

    def test_unknown_counts_are_refused_where_they_matter(self) -> None:
        with pytest.raises(UserError, match=r"(?s)s1.*epochs"):
            passes_per_epoch(given([5, None], [1.0, 2.0], [None, None]))


CASES: list[tuple[list[dict[str, Any]], dict[str, Any], int, list[float]]] = [
    # settings of sources of 240, 60 and 90 documents, of the loader, epochs of the run, passes expected
    ([{}, {}, {}], {}, 1, [1, 1, 1]),
    ([{}, {"epochs": 3}, {}], {}, 1, [1, 3, 1]),
    ([{}, {"epochs": 0.25}, {"epochs": 1.5}], {}, 4, [4, 1, 6]),
    ([{"weight": 2}, {"weight": 2}, {"weight": 2}], {}, 2, [2, 2, 2]),
    ([{"weight": 1}, {"weight": 4}, {"epochs": 2}], {}, 2, [2 * 300 / 480, 2 * 4 * 300 / 480, 4]),
    ([{"epochs": 1}, {}, {}], {"temperature": 2.0}, 1, [1, 67 / 60, 82 / 90]),  # of 150: by √60 to √90
]


@pytest.mark.parametrize("window", [7, 40, 1000])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_shares_to_the_document(tmp_path: Path, case: int, packing: bool, window: int) -> None:
    settings, options, epochs, expected = CASES[case]
    counts = (240, 60, 90)
    sources = [stream(tmp_path, c, i, **s) for i, (c, s) in enumerate(zip(counts, settings, strict=True))]
    source = loader(sources, packing, window, **options)
    assert taken(source, epochs) == {
        i: int(e * c + 1e-9) for i, (e, c) in enumerate(zip(expected, counts, strict=True))
    }
    # Nothing comes up more than once more often than anything else of its source.
    sequences = source.sequences(0, sum(source.epoch_sequences(e) for e in range(epochs)))
    often: dict[int, set[int]] = {}
    for (number, _, _), times in places(sequences).items():
        often.setdefault(number, set()).add(times)
    assert all(max(times) - min(times) <= 1 for times in often.values())


@pytest.mark.parametrize("window", [7, 50, 1000])
def test_a_source_less_than_once_per_epoch_goes_on_where_it_left(tmp_path: Path, window: int) -> None:
    source = loader([stream(tmp_path, 100), stream(tmp_path, 90, 1, epochs=0.3)], window=window)
    assert [taken(source, 1, after=e)[1] for e in range(10)] == [27] * 10
    first = sum(source.epoch_sequences(e) for e in range(10))
    often = {p: n for p, n in places(source.sequences(0, first)).items() if p[0] == 1}
    assert len(often) == 90 and set(often.values()) == {3}


def test_sources_are_spread_evenly_over_the_epoch(tmp_path: Path) -> None:
    mixture = Mixture(
        [stream(tmp_path, 600), stream(tmp_path, 200, 1), stream(tmp_path, 90, 2, epochs=0.5)],
        20, 0, 1.0, threading.Event(),
    )  # fmt: skip
    before, ended, windows = mixture.start, False, 0
    whole = np.array([600, 200, 45])
    while not ended:
        made, before, ended = mixture.window(0, before)
        windows += 1
        due = whole * sum(before) / whole.sum()
        assert np.abs(np.array(before) - due).max() <= 1.5
        assert len(made) == 20 or ended
    assert before == tuple(whole) and windows == 43


def test_a_source_that_ends_early_leaves_its_place_to_the_others(tmp_path: Path) -> None:
    """Rows that a filter left out after the first ones: there are fewer documents than the rows let expect."""
    sources = [stream(tmp_path, 100), stream(tmp_path, 60, 1, rows=600)]
    mixture = Mixture(sources, 20, 0, 1.0, threading.Event())
    before, ended, sizes = mixture.start, False, []
    while not ended:
        made, before, ended = mixture.window(0, before)
        sizes.append(len(made))
    assert before == (100, 60) and sizes == [20] * 8


def test_rows_that_are_split_do_not_crowd_to_one_end(tmp_path: Path) -> None:
    """A book is one row of many documents; it must not wait until all the chats have gone."""
    sources = [stream(tmp_path, 100), SourceStream("book", book(tmp_path, 100), rows=1)]
    mixture = Mixture(sources, 20, 0, 1.0, threading.Event())
    assert mixture.window(0, mixture.start)[1] == (10, 10)


def book(tmp_path: Path, count: int) -> TokenStore:
    pieces = [d.__class__(d.where, 0, d.tokens, d.learned) for d in documents(count, 1, 1)]
    return write_store(tmp_path / "book", pieces, chunk=1000)


def test_a_source_up_to_a_window_is_shuffled_as_a_whole(tmp_path: Path) -> None:
    order = np.concatenate(loader([stream(tmp_path, 400)], packing=False, window=400).sequences(0, 400))
    place = order["chunk"] * 16 + order["index"]
    assert abs(np.corrcoef(place, np.arange(400))[0, 1]) < 0.15


def test_the_first_pass_takes_windows_in_order_and_later_ones_do_not(tmp_path: Path) -> None:
    source = loader([stream(tmp_path, 400)], packing=False, window=32)
    first, second = (np.concatenate(source.sequences(n, 400))["chunk"] // 2 for n in (0, 400))
    # 400 documents are 13 windows, the last of them one of 16.
    assert (np.diff(first.reshape(25, 16)[::2].mean(1)) > 0).all() and first[:32].max() == 0
    assert not (np.diff(second) >= 0).all() and sorted(first) == sorted(second)
    assert [len(set(second[i : i + 16])) for i in range(0, 400, 16)].count(1) > 12  # still whole windows


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("settings", [({}, {}), ({"epochs": 2}, {}), ({"epochs": 0.5}, {"epochs": 1.5})])
@pytest.mark.parametrize("window", [10, 10_000])
def test_a_growing_store_gives_the_same_order(tmp_path: Path, packing: bool, settings: Any, window: int) -> None:
    made = [documents(200, i, i) for i in range(2)]
    whole = [SourceStream(f"s{i}", write_store(tmp_path / f"whole{i}", made[i], 8), 200, **settings[i]) for i in (0, 1)]
    expected = loader(whole, packing, window).sequences(0, 400)
    folders = [tmp_path / f"growing{i}" for i in (0, 1)]
    for folder in folders:
        folder.mkdir()

    def write() -> None:
        for chunk in range(25):
            for folder, one in zip(folders, made, strict=True):
                write_chunk(folder, chunk, one[8 * chunk : 8 * chunk + 8])
                time.sleep(0.002)
        for folder in folders:
            finish(folder, 25, {})

    writer = threading.Thread(target=write)
    writer.start()
    growing = loader(
        [SourceStream(f"s{i}", TokenStore(folders[i]), 200, **settings[i]) for i in (0, 1)], packing, window
    )
    found = [growing.sequences(at, 1)[0] for at in range(400)]
    writer.join()
    assert all(a.tolist() == b.tolist() for a, b in zip(found, expected, strict=True))


def test_the_first_steps_do_not_wait_for_the_whole(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", documents(64), 16, done=False)
    source = loader([SourceStream("a", store, 1000)], window=32)
    batch = source.step(0, 4, 4, 0, 1)
    assert batch.supervised > 0 and 0 < batch.epoch < 0.05


def test_what_ends_the_tokenising_ends_the_wait(tmp_path: Path) -> None:
    store = write_store(tmp_path / "a", documents(64), 16, done=False)
    source = loader([SourceStream("a", store, 1000)], window=32)
    fail(tmp_path / "a", UserError("data.train.0", "x", "went wrong", "mend it"))
    with pytest.raises(UserError, match="went wrong"):
        source.epoch_sequences()
    dead = loader(
        [SourceStream("a", TokenStore(write_store(tmp_path / "b", documents(9), 16, False).folder, lambda: False))]
    )
    with pytest.raises(UserError, match="died"):
        dead.epoch_sequences()


@pytest.mark.parametrize("settings", [{}, {"epochs": 0.1}])
def test_nothing_to_learn_from_is_told(tmp_path: Path, settings: dict[str, Any]) -> None:
    source = loader([stream(tmp_path, 5 if settings else 0, **settings)])
    with pytest.raises(UserError, match="not one document"):
        source.step(0, 1, 1, 0, 1)


def test_an_empty_source_among_others_does_no_harm(tmp_path: Path) -> None:
    source = loader([stream(tmp_path, 0), stream(tmp_path, 30, 1), stream(tmp_path, 0, 2, epochs=3)])
    assert taken(source, 2) == {1: 60}


def test_names() -> None:
    def names(*sources: Any) -> list[str]:
        return source_names([Source.model_validate(s if isinstance(s, dict) else {"path": s}) for s in sources])

    assert names("data/chat.jsonl", "code.parquet") == ["chat", "code"]
    assert names("a/train.jsonl.gz", "b/train.jsonl") == ["a/train", "b/train"]
    assert names("logs/*.jsonl", "hf:owner/set", "folder/", "/x/v1.5.csv") == ["logs", "set", "folder", "v1.5"]
    assert names({"path": "hf:o/s", "subset": "en"}, {"path": "hf:o/s", "subset": "de"}) == ["s/en", "s/de"]
    assert names({"path": "a.txt", "name": "mine"}, {"path": "b.txt", "name": "mine"}) == ["mine", "mine 2"]
    assert names("a.txt", "a.txt", "*.txt") == ["a", "a 2", "data"]
