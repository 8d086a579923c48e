"""Each step's batch is the same on any number of ranks and from any start, and its labels are right."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stores
from support.stores import LENGTH, PAD, documents, ids_of, places, seen, stream

from shardwise.core.errors import UserError
from shardwise.data.loader import IGNORE, Loader, MicroBatch
from shardwise.data.mixing import SourceStream
from shardwise.data.prefetcher import Prefetcher

BATCH, COUNT = 8, 150


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    FOLDER.append(tmp_path_factory.mktemp("stores"))
    return FOLDER[-1]


FOLDER: list[Path] = []


def loader(packing: bool = True, seed: int = 3, count: int = COUNT) -> Loader:
    return stores.loader([stream(FOLDER[-1], count)], packing, seed=seed)


def mixed(packing: bool = True, window: int = 60) -> Loader:
    """Three sources in several windows, none of them once per epoch as it is."""
    sources = [
        stream(FOLDER[-1], COUNT, 0, weight=2.0),
        stream(FOLDER[-1], 70, 1),
        stream(FOLDER[-1], 40, 2, epochs=1.75),
    ]
    return stores.loader(sources, packing, window, temperature=1.5)


MAKERS = [loader, mixed]


def rows_of(micro: MicroBatch) -> list[tuple[Any, ...]]:
    """The rows of a micro-batch without their padding."""
    rows = []
    for ids, labels in zip(ids_of(micro).tolist(), micro.labels.tolist(), strict=True):
        width = sum(i != PAD for i in ids)
        rows.append((tuple(ids[:width]), tuple(labels[:width])))
    return rows


def all_rows(source: Loader, position: int, ranks: int, micro: int) -> list[tuple[Any, ...]]:
    parts = [source.step(position, BATCH, micro, rank, ranks) for rank in range(ranks)]
    return [row for part in parts for m in part.micro_batches for row in rows_of(m)]


def all_rows_of_one(source: Loader, position: int) -> list[tuple[Any, ...]]:
    return rows_of(source.step(position, 1, 1, 0, 1).micro_batches[0])


def same(a: Any, b: Any) -> bool:
    pairs = zip(a.micro_batches, b.micro_batches, strict=True)
    tensors = [
        (getattr(x, f), getattr(y, f))
        for x, y in pairs
        for f in ("input_ids", "labels", "position_ids", "attention_mask")
    ]
    equal = all((p is None and q is None) or torch.equal(p, q) for p, q in tensors)
    return equal and (a.supervised, a.tokens, a.epoch) == (b.supervised, b.tokens, b.epoch)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("position", [0, 16, 72, 400])
def test_the_ranks_together_compute_the_same_batch(make: Any, packing: bool, position: int) -> None:
    alone = Counter(all_rows(make(packing), position, 1, BATCH))
    assert sum(alone.values()) == BATCH
    for ranks, micro in [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]:
        assert Counter(all_rows(make(packing), position, ranks, micro)) == alone


def test_every_rank_has_the_same_number_of_forwards() -> None:
    source = loader()
    for ranks, micro in [(1, 4), (2, 2), (4, 1), (4, 2)]:
        counts = {len(source.step(0, BATCH, micro, rank, ranks).micro_batches) for rank in range(ranks)}
        assert counts == {BATCH // (micro * ranks)}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("packing", [True, False])
def test_resuming_anywhere_gives_the_same_batches(make: Any, packing: bool) -> None:
    straight = make(packing)
    epoch = straight.epoch_sequences()
    steps = 3 * epoch // BATCH  # across two ends of epochs, which do not fall on ends of batches
    expected = [straight.step(n * BATCH, BATCH, 2, 1, 2) for n in range(steps)]
    for start in (0, 1, epoch // BATCH, epoch // BATCH + 1, steps - 1):
        resumed = make(packing)
        assert all(same(resumed.step(n * BATCH, BATCH, 2, 1, 2), expected[n]) for n in range(start, steps))


@pytest.mark.parametrize("window", [7, 60, 1000])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("stops", [(0.3, 0.6), (0.05, 0.95), (0.5, 0.5)])
def test_an_epoch_on_one_then_three_then_two_ranks(packing: bool, window: int, stops: tuple[float, float]) -> None:
    """Each example of a mixed, packed, shuffled epoch is seen as often as it should be, by whichever rank."""

    def make() -> Loader:
        sources = [stream(FOLDER[-1], COUNT, 0), stream(FOLDER[-1], 70, 1), stream(FOLDER[-1], 40, 2, epochs=2)]
        return stores.loader(sources, packing, window)

    size = make().epoch_sequences()
    batch = 6
    turns = [round(s * size / batch) * batch for s in (0.0, *stops)] + [size // batch * batch]
    found = Counter[int]()
    for ranks, start, stop in zip((1, 3, 2), turns[:-1], turns[1:], strict=True):
        for rank in range(ranks):
            mine = make()  # a new process, which knows the position alone
            for position in range(start, stop, batch):
                for micro in mine.step(position, batch, batch // ranks, rank, ranks).micro_batches:
                    found.update(seen(micro))
    for position in range(turns[-1], size):
        found.update(seen(make().step(position, 1, 1, 0, 1).micro_batches[0]))
    numbers = [(source, n) for source, count in enumerate((COUNT, 70, 40)) for n in range(count)]
    assert found == Counter({10_000 * source + n: 2 if source == 2 else 1 for source, n in numbers})


def test_a_batch_across_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    source = loader()
    position = source.epoch_sequences() - 3
    one_by_one = [row for n in range(BATCH) for row in all_rows_of_one(source, position + n)]
    assert all_rows(source, position, 1, BATCH) == one_by_one
    assert one_by_one[3:] != [row for n in range(5) for row in all_rows_of_one(source, n)]  # epochs differ


@pytest.mark.parametrize("make", MAKERS)
def test_going_back_gives_the_same_batches(make: Any) -> None:
    source = make()
    first = source.step(0, BATCH, 1, 0, 1)
    source.step(5 * source.epoch_sequences(), BATCH, 1, 0, 1)
    assert same(source.step(0, BATCH, 1, 0, 1), first)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("window", [1, 9, 60, 1000])
def test_an_epoch_serves_every_document_once(packing: bool, window: int) -> None:
    source = stores.loader([stream(FOLDER[-1], COUNT), stream(FOLDER[-1], 70, 1)], packing, window)
    tokens = [t for number, count in enumerate((COUNT, 70)) for d in documents(count, number, number) for t in d.tokens]
    position, found = 0, Counter[int]()
    for epoch in range(2):
        size = source.epoch_sequences(epoch)
        for _ in range(size):
            (micro,) = source.step(position, 1, 1, 0, 1).micro_batches
            found.update(i for i in ids_of(micro).flatten().tolist() if i != PAD)
            position += 1
        assert found == Counter({int(t): epoch + 1 for t in tokens})


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_counts_are_those_of_all_ranks(make: Any, packing: bool, ranks: int) -> None:
    source = make(packing)
    for position in range(0, 4 * BATCH, BATCH):
        parts = [source.step(position, BATCH, 2, rank, ranks) for rank in range(ranks)]
        micros = [m for part in parts for m in part.micro_batches]
        supervised = sum(int((m.labels != IGNORE).sum()) for m in micros)
        tokens = sum(int((ids_of(m) != PAD).sum()) for m in micros)
        assert all((p.supervised, p.tokens) == (supervised, tokens) for p in parts)
        assert all(sum(p.by_source) == supervised and len(p.by_source) == len(source.sources) for p in parts)


@pytest.mark.parametrize("packing", [True, False])
def test_every_position_tells_its_source(packing: bool) -> None:
    source = mixed(packing)
    for position in range(0, 5 * BATCH, BATCH):
        batch, counts = source.step(position, BATCH, 4, 0, 1), Counter[int]()
        for micro in batch.micro_batches:
            assert micro.sources is not None and micro.source_count == 3
            real = ids_of(micro) != PAD
            assert torch.equal(micro.sources[real], micro.input_ids[real] // 1_000_000)
            counts.update(micro.sources[micro.labels != IGNORE].tolist())
        assert tuple(counts[i] for i in range(3)) == batch.by_source
    assert loader(packing).step(0, 1, 1, 0, 1).micro_batches[0].sources is None, "nothing superfluous"


@pytest.mark.parametrize("packing", [True, False])
def test_labels_are_the_next_token_of_the_same_document(packing: bool) -> None:
    source = loader(packing)
    is_learned = {int(t): bool(x) for d in documents(COUNT) for t, x in zip(d.tokens, d.learned, strict=True)}
    crossings = 0
    for micro in source.step(0, BATCH, 2, 0, 1).micro_batches:
        for ids, labels in zip(ids_of(micro).tolist(), micro.labels.tolist(), strict=True):
            for here, after, label in zip(ids, [*ids[1:], PAD], labels, strict=True):
                together = PAD not in (here, after) and here // 100 == after // 100
                crossings += PAD not in (here, after) and not together
                assert label == (after if together and is_learned[after] else IGNORE)
    assert crossings > 0 or not packing  # the test has seen neighbours


def test_a_first_token_is_never_learned(tmp_path: Path) -> None:
    """Also where a writer says so: no document may teach the end of the one before it."""
    made = documents(40)
    for document in made:
        document.learned[:] = True
    source = stores.loader([SourceStream("all", stores.write_store(tmp_path / "all", made))])
    batch = source.step(0, 6, 6, 0, 1)
    (micro,) = batch.micro_batches
    assert batch.supervised == int((micro.labels != IGNORE).sum())
    assert not (micro.labels % 100 == 1).any()


def test_positions_restart_with_each_document_and_with_the_padding() -> None:
    widest = 0
    for micro in loader(count=9).step(0, BATCH, 4, 0, 1).micro_batches:
        assert micro.attention_mask is None and micro.position_ids is not None
        for ids, positions in zip(ids_of(micro).tolist(), micro.position_ids.tolist(), strict=True):
            padding = ids.count(PAD)
            assert positions == [(i - 1) % 100 for i in ids if i != PAD] + list(range(padding))
            widest = max(widest, padding)
    assert widest > 1  # the test has seen padding


def test_padding_of_packed_rows_is_of_their_own_tokens() -> None:
    """The vector of the padding token may be zero: alone in its document it has no gradient in some models."""
    padding = 0
    for micro in loader(count=9).step(0, BATCH, 4, 0, 1).micro_batches:
        assert (micro.input_ids != PAD).all() and micro.filled is not None
        behind = torch.arange(micro.input_ids.shape[1]) >= micro.filled[:, None]
        first = micro.input_ids[:, :1].expand_as(behind)
        assert torch.equal(micro.input_ids[behind], first[behind]) and (micro.labels[behind] == IGNORE).all()
        padding += int(behind.sum())
    assert padding > 1  # the test has seen padding


def test_unpacked_rows_have_a_mask_instead() -> None:
    for micro in loader(packing=False).step(0, BATCH, 4, 0, 1).micro_batches:
        assert micro.position_ids is None and micro.attention_mask is not None
        assert torch.equal(micro.attention_mask, (micro.input_ids != PAD).long())
        assert all(len({i // 100 for i in ids if i != PAD}) == 1 for ids in micro.input_ids.tolist())


def test_a_micro_batch_is_as_wide_as_its_longest_row() -> None:
    for micro in loader(packing=False).step(0, BATCH, 2, 0, 1).micro_batches:
        assert int((micro.input_ids != PAD).sum(dim=1).max()) == micro.input_ids.shape[1] <= LENGTH


def test_epoch_is_told_as_it_goes() -> None:
    source = loader()
    size = source.epoch_sequences(0)
    assert source.step(0, BATCH, 1, 0, 1).epoch == pytest.approx(BATCH / size), "where the step leaves off"
    assert source.step(size // 2, BATCH, 1, 0, 1).epoch == pytest.approx((size // 2 + BATCH) / size)
    assert source.step(size - BATCH, BATCH, 1, 0, 1).epoch == 1
    assert source.locate(size + 3) == (1, 3)
    told = [mixed().step(p, BATCH, 1, 0, 1).epoch for p in range(0, 3 * mixed().epoch_sequences(), BATCH)]
    assert told == sorted(told) and 2.5 < told[-1] < 3.5


def test_efficiency_is_that_of_the_sequences() -> None:
    source = mixed()
    sequences = source.sequences(0, source.epoch_sequences())
    tokens = sum(int(s["length"].sum()) for s in sequences)
    assert source.efficiency() == pytest.approx(tokens / (LENGTH * len(sequences)))
    assert 0.9 < source.efficiency() <= 1


@pytest.mark.parametrize("packing", [True, False])
def test_what_is_remembered_of_a_window_is_little(packing: bool) -> None:
    """Not even by way of a view: the memory of a long run must not grow with what it has seen."""
    source = mixed(packing)
    source.epoch_sequences(9)
    assert len(source._marks) > 50 and len(source._packed) == 2
    assert all(mark.carry.base is None and mark.carry.nbytes < 20 * LENGTH for mark in source._marks)


def test_a_batch_larger_than_the_data_goes_round() -> None:
    part = loader(count=3).step(0, 64, 64, 0, 1)
    assert len(rows_of(part.micro_batches[0])) == 64


def test_seeds_differ() -> None:
    assert all_rows(loader(seed=1), 0, 1, 1) != all_rows(loader(seed=2), 0, 1, 1)


class TestAhead:
    """The next batch is laid out in the background, and nothing but the time it takes is different."""

    def test_gives_the_same_batches(self) -> None:
        with Prefetcher(mixed(), BATCH, 2, 1, 2, end=20 * BATCH) as ahead:
            plain = mixed()
            for n in [*range(10), 3, 4, *range(15, 20)]:  # also where it is not the next that is asked for
                assert same(ahead.step(n * BATCH), plain.step(n * BATCH, BATCH, 2, 1, 2))

    def test_stops_at_the_end_of_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source, asked = loader(), []
        step = source.step
        monkeypatch.setattr(source, "step", lambda at, *rest: (asked.append(at), step(at, *rest))[1])
        with Prefetcher(source, BATCH, 1, 0, 1, end=3 * BATCH) as ahead:
            for n in range(3):
                ahead.step(n * BATCH)
        assert asked == [0, BATCH, 2 * BATCH]

    def test_raises_where_the_batch_is_asked_for(self, tmp_path: Path) -> None:
        store = stores.write_store(tmp_path / "a", documents(40), 16, done=False)
        with Prefetcher(stores.loader([SourceStream("a", store)], window=16), 1, 1, 0, 1, end=1000) as ahead:
            assert ahead.step(0).supervised
            stores_fail(tmp_path / "a")
            with pytest.raises(UserError, match="went wrong"):
                for position in range(1, 100):
                    ahead.step(position)

    def test_does_not_hold_up_the_end(self, tmp_path: Path) -> None:
        """The run is left while the thread waits for a chunk that will never come."""
        store = stores.write_store(tmp_path / "a", documents(32), 16, done=False)
        source = stores.loader([SourceStream("a", store)], window=16)
        first = len(source._window(0))
        with Prefetcher(source, first, 1, 0, 1, end=1000) as ahead:
            ahead.step(0)
        assert not [t for t in threading.enumerate() if t.name == "next batch"]


def stores_fail(folder: Path) -> None:
    from shardwise.data.store import fail

    fail(folder, UserError("data.train.0", "x", "went wrong", "mend it"))


def test_places_are_unique() -> None:
    """What the tests count documents by."""
    source = loader()
    assert set(places(source.sequences(0, source.epoch_sequences())).values()) == {1}
