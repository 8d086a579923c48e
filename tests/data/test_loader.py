"""Each step's batch is the same on any number of ranks and from any start, and its labels are right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data.loader import IGNORE, Loader, MicroBatch
from shardwise.data.prepare import Corpus

LENGTH, BATCH, PAD = 64, 8, 0


def corpus(count: int = 150, seed: int = 0) -> Corpus:
    """Documents of 2 to 64 tokens; a token tells its document and place, 0 is padding alone."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, LENGTH + 1, count)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.concatenate([1 + np.arange(s) + 100 * d for d, s in enumerate(sizes)]).astype(np.int32)
    learned = rng.random(len(tokens)) < 0.6
    learned[starts[:-1]] = False
    return Corpus(tokens, learned, starts, np.zeros(count, dtype=np.int32))


def loader(packing: bool = True, seed: int = 3) -> Loader:
    return Loader(corpus(), LENGTH, packing, seed, PAD)


def rows_of(micro: MicroBatch) -> list[tuple[Any, ...]]:
    """The rows of a micro-batch without their padding."""
    rows = []
    for ids, labels in zip(micro.input_ids.tolist(), micro.labels.tolist(), strict=True):
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


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("position", [0, 16, 72, 400])
def test_the_ranks_together_compute_the_same_batch(packing: bool, position: int) -> None:
    alone = Counter(all_rows(loader(packing), position, 1, BATCH))
    assert sum(alone.values()) == BATCH
    for ranks, micro in [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]:
        assert Counter(all_rows(loader(packing), position, ranks, micro)) == alone


def test_every_rank_has_the_same_number_of_forwards() -> None:
    source = loader()
    for ranks, micro in [(1, 4), (2, 2), (4, 1), (4, 2)]:
        counts = {len(source.step(0, BATCH, micro, rank, ranks).micro_batches) for rank in range(ranks)}
        assert counts == {BATCH // (micro * ranks)}


@pytest.mark.parametrize("packing", [True, False])
def test_resuming_anywhere_gives_the_same_batches(packing: bool) -> None:
    straight = loader(packing)
    epoch = straight.epoch_sequences()
    steps = 3 * epoch // BATCH  # across two ends of epochs, which do not fall on ends of batches
    expected = [straight.step(n * BATCH, BATCH, 2, 1, 2) for n in range(steps)]
    for start in (0, 1, epoch // BATCH, epoch // BATCH + 1, steps - 1):
        resumed = loader(packing)
        assert all(same(resumed.step(n * BATCH, BATCH, 2, 1, 2), expected[n]) for n in range(start, steps))


def test_a_batch_across_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    source = loader()
    position = source.epoch_sequences() - 3
    one_by_one = [row for n in range(BATCH) for row in all_rows_of_one(source, position + n)]
    assert all_rows(source, position, 1, BATCH) == one_by_one
    assert one_by_one[3:] != [row for n in range(5) for row in all_rows_of_one(source, n)]  # epochs differ


def test_going_back_gives_the_same_batches() -> None:
    source = loader()
    first = source.step(0, BATCH, 1, 0, 1)
    source.step(5 * source.epoch_sequences(), BATCH, 1, 0, 1)
    assert same(source.step(0, BATCH, 1, 0, 1), first)


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_serves_every_document_once(packing: bool) -> None:
    source, documents = loader(packing), corpus()
    position, seen = 0, Counter[int]()
    for epoch in range(2):
        size = source.epoch_sequences(epoch)
        for _ in range(size):
            (micro,) = source.step(position, 1, 1, 0, 1).micro_batches
            seen.update(i for i in micro.input_ids.flatten().tolist() if i != PAD)
            position += 1
        assert seen == Counter({int(t): epoch + 1 for t in documents.tokens})


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_counts_are_those_of_all_ranks(packing: bool, ranks: int) -> None:
    source = loader(packing)
    for position in range(0, 4 * BATCH, BATCH):
        parts = [source.step(position, BATCH, 2, rank, ranks) for rank in range(ranks)]
        micros = [m for part in parts for m in part.micro_batches]
        supervised = sum(int((m.labels != IGNORE).sum()) for m in micros)
        tokens = sum(int((m.input_ids != PAD).sum()) for m in micros)
        assert all((p.supervised, p.tokens) == (supervised, tokens) for p in parts)


@pytest.mark.parametrize("packing", [True, False])
def test_labels_are_the_next_token_of_the_same_document(packing: bool) -> None:
    source, documents = loader(packing), corpus()
    is_learned = dict(zip(documents.tokens.tolist(), documents.learned.tolist(), strict=True))
    crossings = 0
    for micro in source.step(0, BATCH, 2, 0, 1).micro_batches:
        for ids, labels in zip(micro.input_ids.tolist(), micro.labels.tolist(), strict=True):
            for here, after, label in zip(ids, [*ids[1:], PAD], labels, strict=True):
                together = PAD not in (here, after) and here // 100 == after // 100
                crossings += PAD not in (here, after) and not together
                assert label == (after if together and is_learned[after] else IGNORE)
    assert crossings > 0 or not packing  # the test has seen neighbours


def test_positions_restart_with_each_document_and_with_the_padding() -> None:
    widest = 0
    for micro in Loader(corpus(9), LENGTH, True, 0, PAD).step(0, BATCH, 4, 0, 1).micro_batches:
        assert micro.attention_mask is None and micro.position_ids is not None
        for ids, positions in zip(micro.input_ids.tolist(), micro.position_ids.tolist(), strict=True):
            padding = ids.count(PAD)
            assert positions == [(i - 1) % 100 for i in ids if i != PAD] + list(range(padding))
            widest = max(widest, padding)
    assert widest > 1  # the test has seen padding


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


def test_a_batch_larger_than_the_data_goes_round() -> None:
    small = Loader(corpus(3), LENGTH, True, 0, PAD)
    part = small.step(0, 64, 64, 0, 1)
    assert len(rows_of(part.micro_batches[0])) == 64


def test_seeds_differ() -> None:
    assert all_rows(loader(seed=1), 0, 1, 1) != all_rows(loader(seed=2), 0, 1, 1)
