"""Documents are packed whole, each once per epoch, with little padding, and the same for a seed anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.data.packing import pack

CAPACITY = 1024


def lengths(kind: str, count: int = 2000) -> np.ndarray:
    rng = np.random.default_rng(5)
    return {
        # Chats are mostly short with a long tail; split books are full sequences and one rest each.
        "chats": np.clip(rng.lognormal(5.2, 0.8, count), 12, CAPACITY).astype(np.int64),
        "split texts": np.where(rng.random(count) < 0.8, CAPACITY, rng.integers(2, CAPACITY, count)),
        "just over half": rng.integers(CAPACITY // 2 + 1, CAPACITY, count),
        "all equal": np.full(count, 100),
        "all full": np.full(count, CAPACITY),
        "tiny": rng.integers(2, 4, count),
        "one": np.array([7]),
    }[kind]


KINDS = ["chats", "split texts", "just over half", "all equal", "all full", "tiny", "one"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", [True, False])
def test_every_document_once_and_never_too_much(kind: str, packing: bool) -> None:
    sizes = lengths(kind)
    sequences = pack(sizes, CAPACITY, 3, 1, packing)
    assert sorted(np.concatenate(sequences)) == list(range(len(sizes)))
    assert all(0 < sizes[s].sum() <= CAPACITY for s in sequences)
    assert packing or all(len(s) == 1 for s in sequences)


def test_little_is_padding() -> None:
    sizes = lengths("chats")
    sequences = pack(sizes, CAPACITY, 0, 0, True)
    assert sizes.sum() / (len(sequences) * CAPACITY) > 0.95
    unpacked = pack(sizes, CAPACITY, 0, 0, False)
    assert sizes.sum() / (len(unpacked) * CAPACITY) < 0.4  # what packing is for


def test_best_fit() -> None:
    # First fit would put the 1 beside the 7; where it fills a sequence it leaves that room for longer ones.
    sequences = pack(np.array([7, 5, 4, 1]), 10, 0, 0, True)
    assert sorted(sorted(s.tolist()) for s in sequences) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("packing", [True, False])
def test_seed_and_epoch_decide_the_order(packing: bool) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [s.tolist() for s in pack(lengths("chats", 300), CAPACITY, seed, epoch, packing)]

    assert order(1, 2) == order(1, 2)
    orders = [order(1, 2), order(1, 3), order(2, 2), order(2, 1)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_order_is_no_order_of_length() -> None:
    sizes = lengths("chats")
    starts = np.array([sizes[s[0]] for s in pack(sizes, CAPACITY, 0, 0, True)])
    halves = starts[: len(starts) // 2].mean() / starts[len(starts) // 2 :].mean()
    assert 0.8 < halves < 1.25
