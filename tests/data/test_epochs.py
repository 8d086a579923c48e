"""An epoch is an epoch: over sizes, batches, ranks and mixtures, every document is trained on as often as was asked.

`walk` takes the steps of a run as the loop does, on all ranks, and `check` counts. Bugs planted below must be caught.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import stores
from support.stores import seen, stream

from shardwise.data import epochs as module
from shardwise.data.epochs import Epochs, micro_batches, stream_in_words
from shardwise.data.loader import IGNORE, Loader, StepBatch
from shardwise.data.mixing import passes_per_epoch
from shardwise.data.prefetcher import Prefetcher
from shardwise.nn.objective import sum_by_source
from shardwise.train.evaluation import HeldoutBatching, summed_losses


@dataclass(frozen=True)
class Case:
    """Sources as (documents, settings), and how they are trained on."""

    sources: tuple[tuple[int, dict[str, float]], ...]
    batch: int
    micro: int
    ranks: int
    epochs: float
    packing: bool = True
    window: int = 1000
    temperature: float = 1.0


def drawn(seed: int) -> Case:
    """A case at random, small epochs more often than large ones."""
    rng = np.random.default_rng(seed)
    most = rng.choice([3, 6, 12, 40, 100])
    settings: list[dict[str, float]] = [{}, {}, {"epochs": 2.0}, {"epochs": 0.4}, {"weight": 3.0}]
    sources = tuple(
        (int(rng.integers(1, most)), settings[int(rng.integers(len(settings)))]) for _ in range(rng.integers(1, 4))
    )
    if all(s.get("epochs", 1) * count < 1 for count, s in sources):
        sources = ((8, {}),)
    ranks, micro = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    return Case(
        sources, ranks * micro * int(rng.integers(1, 5)), micro, ranks, float(rng.choice([1, 2, 3, 1.5, 0.4, 2.75])),
        bool(rng.random() < 0.7), int(rng.choice([1, 7, 60, 1000])), float(rng.choice([1, 1, 2])),
    )  # fmt: skip


def loader_of(case: Case, folder: Path, epochs: Epochs | None = None) -> Loader:
    sources = [stream(folder, count, number, **settings) for number, (count, settings) in enumerate(case.sources)]
    return stores.loader(sources, case.packing, case.window, temperature=case.temperature, epochs=epochs)


def walk(case: Case, epochs: Epochs, make: Callable[[], Loader]) -> list[list[StepBatch]]:
    """The steps of a run, each as what all ranks make of it; every rank has a loader of its own, as processes have."""
    steps, position = list[list[StepBatch]](), 0
    ranks = [Prefetcher(make(), case.batch, case.micro, rank, case.ranks, epochs.end) for rank in range(case.ranks)]
    for _ in range(epochs.steps(case.batch)):
        steps.append([rank.step(position) for rank in ranks])
        position += steps[-1][0].sequences
    return steps


def check(case: Case, epochs: Epochs, make: Callable[[], Loader]) -> None:
    """Takes every step and counts the documents of every epoch."""
    steps = walk(case, epochs, make)
    plain = make()
    often, epoch, left = Counter[int](), 0, list(epochs.sizes)
    for parts in steps:
        while not left[epoch]:
            epoch += 1
        first = parts[0]
        together = [(p.supervised, p.tokens, p.epoch, p.sequences, p.by_source) for p in parts]
        assert set(together) == {together[0]}, "ranks disagree"
        assert len({len(p.micro_batches) for p in parts}) == 1, "forwards are collective"
        assert first.sequences == min(case.batch, left[epoch]), "a step is full, or the last of its epoch"
        left[epoch] -= first.sequences
        counted = [m for p in parts for m in p.micro_batches if m.counts]
        assert sum(int((m.labels != IGNORE).sum()) for m in counted) == first.supervised > 0
        assert sum(len(m.input_ids) for m in counted) == first.sequences
        assert all(len(m.input_ids) <= case.micro for p in parts for m in p.micro_batches)
        for micro in counted:
            often += seen(micro)
        if not left[epoch] and (epoch + 1 < len(epochs.sizes) or case.epochs == len(epochs.sizes)):
            assert first.epoch == epoch + 1, "an epoch ends at a whole number"
            check_counts(case, plain, epoch + 1, often)
    assert not any(left) and steps[-1][0].epoch <= ceil(case.epochs)
    told = [parts[0].epoch for parts in steps]
    assert all(a < b for a, b in pairwise(told))


def check_counts(case: Case, loader: Loader, epochs: int, often: Counter[int]) -> None:
    """After whole epochs every document of a source has come up as often as its share says, to one."""
    rates = passes_per_epoch(loader.sources, case.temperature)
    for number, ((count, settings), rate) in enumerate(zip(case.sources, rates, strict=True)):
        mine = [often[10_000 * number + n] for n in range(count)]
        assert sum(mine) == floor(epochs * rate * count)
        assert set(mine) <= {floor(epochs * rate), ceil(epochs * rate)}, "no document before another's turn"
        if not settings and all("weight" not in s for _, s in case.sources) and case.temperature == 1:
            assert set(mine) == {epochs}


def checked(case: Case, folder: Path) -> None:
    epochs = Epochs.of(case.epochs, loader_of(case, folder).epoch_sequences)
    check(case, epochs, lambda: loader_of(case, folder, epochs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.mark.parametrize("seeds", [range(n, n + 15) for n in range(0, 120, 15)], ids=str)
def test_every_document_as_often_as_asked(seeds: range, folder: Path) -> None:
    for seed in seeds:
        try:
            checked(drawn(seed), folder)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {drawn(seed)}") from error


FEW = Case(((8, {}),), 8, 2, 4, 4)  # two packed sequences an epoch, for four ranks
MANY = Case(((150, {}), (40, {"epochs": 2.0})), 12, 2, 3, 2, window=60)


def test_the_cases_are_hard(folder: Path) -> None:
    """Fewer sequences than ranks, ranks without rows, last batches of all sizes, windows that end within an epoch."""
    cases = [drawn(seed) for seed in range(120)]
    sizes = [Epochs.of(c.epochs, loader_of(c, folder).epoch_sequences).sizes for c in cases]
    both = list(zip(cases, sizes, strict=True))
    rowless = sum(any(0 < s % c.batch % (c.micro * c.ranks) < c.ranks for s in size) for c, size in both)
    small = sum(max(size) < c.batch for c, size in both)
    partial = sum(any(s % c.batch for s in size) for c, size in both)
    differing = sum(len(set(size)) > 1 for size in sizes)
    assert rowless > 20 and small > 10 and partial > 60 and differing > 30, (rowless, small, partial, differing)


# --- planted bugs --------------------------------------------------------------------------------------------------


def wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is filled up with the next epoch."""
    monkeypatch.setattr(Epochs, "left", lambda self, position: 1 << 30)


def drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch is dropped."""
    monkeypatch.setattr(Epochs, "steps", lambda self, rows, position=0: sum(size // rows for size in self.sizes))


def repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without rows trains on another's."""
    monkeypatch.setattr("shardwise.data.loader.replace", lambda batch, counts: replace(batch, counts=True))


def idles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without rows leaves the forward out."""
    monkeypatch.setattr("shardwise.data.loader.micro_batches", lambda *a: [r for r in micro_batches(*a) if r])


def loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fill a round of all ranks is lost."""

    def full(count: int, micro: int, rank: int, ranks: int) -> list[range]:
        return [r for r in micro_batches(count, micro, rank, ranks) if len(r) == micro]

    monkeypatch.setattr("shardwise.data.loader.micro_batches", full)


def pads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last micro-batch is filled up from the end of the step, as samplers for several ranks do."""

    def even(count: int, micro: int, rank: int, ranks: int) -> list[range]:
        return [r if len(r) == micro else range(max(0, count - micro), count) for r in micro_batches(count, micro, rank, ranks)]  # noqa: E501  # fmt: skip

    monkeypatch.setattr("shardwise.data.loader.micro_batches", even)


@pytest.mark.parametrize("plant", [wraps, drops, repeats, idles, loses, pads])
def test_planted_bugs_are_caught(plant: Callable[[Any], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked(FEW, folder)
    checked(MANY, folder)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        checked(FEW, folder)
        checked(MANY, folder)


def test_a_loader_that_knows_no_epochs_is_caught(folder: Path) -> None:
    """As it was: steps of a fixed size, as many as the sequences of the first epoch ask for."""
    epochs = Epochs.of(FEW.epochs, loader_of(FEW, folder).epoch_sequences)
    with pytest.raises(AssertionError, match="a step is full, or the last of its epoch"):
        check(FEW, epochs, lambda: loader_of(FEW, folder))


# --- the arithmetic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "batch", "sizes", "steps", "words"),
    [
        (1, 32, (100,), 4, "1 epoch of 100 sequences, 32 a step and 4 in the last of an epoch"),
        (2, 25, (100, 100), 8, "2 epochs of 100 sequences, 25 a step"),
        (1.5, 32, (100, 50), 6, "1.5 epochs, 150 sequences, 32 a step and 4–18 in the last of an epoch"),
        (0.001, 32, (1,), 1, "0.001 epochs, 1 sequence, one step each"),
        (3, 200, (100, 100, 100), 3, "3 epochs of 100 sequences, one step each"),
        (1.1, 100, (100, 10), 2, "1.1 epochs, 110 sequences, 100 a step and 10 in the last of an epoch"),
    ],
)
def test_steps_and_words(count: float, batch: int, sizes: tuple[int, ...], steps: int, words: str) -> None:
    found = Epochs.of(count, lambda epoch: 100)
    assert found.sizes == sizes and found.steps(batch) == steps and found.end == sum(sizes)
    assert found.in_words(count, batch, None) == words
    assert found.in_words(count, batch, 1) == (f"{words}; ended after 1 of {steps} steps" if steps > 1 else words)


def test_steps_from_any_position() -> None:
    """Also one that is on no step's end: a checkpoint of another batch size, or sequences that were dropped."""
    epochs = Epochs((10, 0, 7))
    for batch in (1, 3, 8, 20):
        for position in range(20):
            taken, at = 0, position
            while left := epochs.left(at):
                at, taken = at + min(batch, left), taken + 1
            assert epochs.steps(batch, position) == taken and at == max(17, position)


def test_a_stream_in_words() -> None:
    assert stream_in_words(4, 8, 15) == "2.13 epochs of 15 sequences"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_micro_batches(micro: int, ranks: int) -> None:
    for count in range(1, 50):
        found = [micro_batches(count, micro, rank, ranks) for rank in range(ranks)]
        assert sorted(i for mine in found for turn in mine for i in turn) == list(range(count))
        assert {len(mine) for mine in found} == {ceil(count / (micro * ranks))}
        sizes = [sum(map(len, mine)) for mine in found]
        assert max(sizes) - min(sizes) <= 1 and all(len(turn) <= micro for mine in found for turn in mine)


def test_fractions_are_exact() -> None:
    """1.1 is no float here: half a percent of a sequence must not become one."""
    assert Epochs.of(1.1, lambda epoch: 10).sizes == (10, 1) and Fraction("1.1") - 1 == Fraction(1, 10)
    assert module.Epochs.of(2.0, lambda epoch: epoch + 1).sizes == (1, 2)


# --- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize(("count", "packing"), [(1, True), (7, False), (150, True), (40, False)])
@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (3, 1), (2, 3), (4, 4)])
def test_evaluation_reads_every_document_once(
    count: int, packing: bool, micro: int, ranks: int, together: int, folder: Path
) -> None:
    """On any number of ranks, with rows that are left over; every rank takes part in every forward."""
    found, forwards = Counter[int](), set[int]()
    units = 0.0
    for rank in range(ranks):
        calls: list[Any] = []

        def objective(model: Any, batch: Any, calls: list[Any] = calls) -> Any:
            calls.append(batch)
            return sum_by_source((batch.labels != IGNORE).float().flatten(), batch.labels.flatten() != IGNORE, None, 1)

        objective.figures = ()  # type: ignore[attr-defined]
        counted: list[torch.Tensor] = []
        sums = summed_losses(
            None, objective, stores.loader([stream(folder, count)], packing),  # type: ignore[arg-type]
            HeldoutBatching(micro, rank, ranks, together),
            torch.device("cpu"), counted.append, lambda batches, f=objective: [f(None, b) for b in batches],
        )  # fmt: skip
        for batch in calls[: len(counted)]:
            found += seen(batch)
        forwards.add(len(calls))
        units += float(sums[1, 0])
    assert found == Counter(dict.fromkeys(range(count), 1)) and len(forwards) == 1
    assert units == sum(int(d.learned[1:].sum()) for d in stores.documents(count))
