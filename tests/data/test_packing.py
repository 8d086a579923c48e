"""Documents are packed whole, each once, with little padding, and by best fit."""

from __future__ import annotations

import time

import numpy as np
import pytest

from shardwise.data.packing import DOCUMENT, best_fit, pack

CAPACITY = 1024
KINDS = ["chats", "split texts", "just over half", "all equal", "all full", "tiny", "one", "none"]


def lengths(kind: str, count: int = 2000, seed: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return {
        # Chats are mostly short with a long tail; split books are full sequences and one rest each.
        "chats": np.clip(rng.lognormal(5.2, 0.8, count), 12, CAPACITY).astype(np.int64),
        "split texts": np.where(rng.random(count) < 0.8, CAPACITY, rng.integers(2, CAPACITY, count)),
        "just over half": rng.integers(CAPACITY // 2 + 1, CAPACITY, count),
        "all equal": np.full(count, 100),
        "all full": np.full(count, CAPACITY),
        "tiny": rng.integers(2, 4, count),
        "one": np.array([7]),
        "none": np.array([], dtype=np.int64),
    }[kind]


def window(sizes: np.ndarray, first: int = 0) -> np.ndarray:
    documents = np.zeros(len(sizes), dtype=DOCUMENT)
    documents["length"], documents["index"] = sizes, first + np.arange(len(sizes))
    return documents


def simple_best_fit(sizes: np.ndarray, capacity: int) -> list[int]:
    """The definition: longest first, each where it leaves the least room; the youngest of equal ones."""
    rooms: list[tuple[int, int]] = []  # room, when it last changed
    chosen = [0] * len(sizes)
    for turn, document in enumerate(sorted(range(len(sizes)), key=lambda d: -sizes[d])):
        fitting = [(room, -when, i) for i, (room, when) in enumerate(rooms) if room >= sizes[document]]
        at = min(fitting)[2] if fitting else len(rooms)
        if at == len(rooms):
            rooms.append((capacity, 0))
        rooms[at] = (rooms[at][0] - int(sizes[document]), turn)
        chosen[document] = at
    return chosen


@pytest.mark.parametrize("kind", KINDS)
def test_best_fit_by_its_definition(kind: str) -> None:
    for seed in range(3):
        sizes = lengths(kind, 250, seed)
        assert best_fit(sizes, CAPACITY).tolist() == simple_best_fit(sizes, CAPACITY)


def test_best_fit_leaves_room_for_longer_ones() -> None:
    # First fit would put the 1 beside the 7; where it fills a sequence it leaves that room for longer ones.
    assert best_fit(np.array([7, 5, 4, 1]), 10).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_every_document_once_and_never_too_much(kind: str, packing: bool, last: bool) -> None:
    sizes = lengths(kind)
    packed, carry = pack(window(sizes), CAPACITY, packing, np.random.default_rng(0), last)
    sequences = [packed[i] for i in range(len(packed))]
    there = np.concatenate([*sequences, carry])
    assert sorted(there["index"].tolist()) == list(range(len(sizes)))
    assert all(0 < s["length"].sum() <= CAPACITY for s in sequences)
    assert packing or all(len(s) == 1 for s in sequences)
    assert carry["length"].sum() * 2 < CAPACITY and not (len(carry) and (last or not packing))
    assert sum(s["length"].sum() * 2 < CAPACITY for s in sequences) <= (1 if last else 0) or not packing


@pytest.mark.parametrize("size", [100, 500, 65536])
def test_little_is_padding(size: int) -> None:
    """A realistic distribution: log-normal, 350 tokens in the mean, at most 2048, 200,000 documents."""
    rng = np.random.default_rng(0)
    count, capacity = 200_000 if size > 1000 else 20_000, 2048
    sizes = np.clip(rng.lognormal(np.log(365) - 0.5, 1.0, count), 4, capacity).astype(np.int64)
    sequences, carry, began = 0, window(sizes[:0]), time.process_time()
    for start in range(0, count, size):
        fresh = np.concatenate([carry, window(sizes[start : start + size], start)])
        packed, carry = pack(fresh, capacity, True, rng, start + size >= count)
        sequences += len(packed)
    efficiency, took = sizes.sum() / (sequences * capacity), time.process_time() - began
    print(f"\nwindow {size}: {count} documents of {sizes.mean():.0f} tokens, {efficiency:.2%} full, {took:.2f} s")
    assert efficiency >= 0.98
    assert took < 60, "of CPU time; minutes where windows are searched in quadratic time"


def test_order_is_no_order_of_length() -> None:
    packed, _ = pack(window(lengths("chats")), CAPACITY, True, np.random.default_rng(0), True)
    starts = np.array([packed[i]["length"][0] for i in range(len(packed))])
    halves = starts[: len(starts) // 2].mean() / starts[len(starts) // 2 :].mean()
    assert 0.8 < halves < 1.25


@pytest.mark.parametrize("packing", [True, False])
def test_the_random_numbers_decide_the_order(packing: bool) -> None:
    def order(seed: int) -> list[list[int]]:
        packed, _ = pack(window(lengths("chats", 300)), CAPACITY, packing, np.random.default_rng(seed), True)
        return [packed[i]["index"].tolist() for i in range(len(packed))]

    assert order(1) == order(1) != order(2)
