"""Which document each token is counted in, and that padding is counted nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardwise.data.layout import CausalLayout
from shardwise.data.packing import DOCUMENT
from shardwise.data.preference_layout import PreferenceLayout
from shardwise.data.rows import RowBatch
from shardwise.data.store import LEARNED
from shardwise.parallel.context.mask import ContextRows
from shardwise.parallel.context.split import split_batch
from shardwise.parallel.routers.token_groups import Tokens, grouped


class Rows:
    """Documents of these lengths, whose last two tokens are trained on."""

    source_count = 1

    def __init__(self, packing: bool, lengths: list[list[int]]) -> None:
        self.packing = packing
        flat = [length for row in lengths for length in row]
        self.tokens = [np.arange(1, n + 1, dtype=np.uint32) | np.where(np.arange(n) >= n - 2, LEARNED, 0) for n in flat]
        numbers = iter(range(len(flat)))
        self.sequences = [np.array([(0, 0, next(numbers), n, 2) for n in row], dtype=DOCUMENT) for row in lengths]

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        return self.tokens[index].astype(np.uint32)


def causal(packing: bool, lengths: list[list[int]]) -> Any:
    rows = Rows(packing, lengths)
    return CausalLayout(0).collate(rows, rows.sequences, 0)


def test_packed_rows() -> None:
    numbers, weights = grouped(causal(True, [[3, 4], [5]]), "document")
    # The padding of the second row is a document to attention, and none here.
    assert numbers.tolist() == [0] * 3 + [1] * 4 + [2] * 5 + [4] * 2
    assert weights.tolist() == [2, 2, 2, 0, 0]


def test_rows_of_one_document() -> None:
    numbers, weights = grouped(causal(False, [[3], [5]]), "document")
    assert numbers.tolist() == [0] * 3 + [2] * 2 + [1] * 5 and weights.tolist() == [2, 2, 0]


@pytest.mark.parametrize("packing", [True, False])
def test_the_micro_batch_as_one_group(packing: bool) -> None:
    numbers, weights = grouped(causal(packing, [[3], [5]]), "micro_batch")
    assert numbers.tolist() == [0] * 3 + [1] * 2 + [0] * 5 and weights.tolist() == [4, 0]


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("packing", [True, False])
def test_parts_of_rows_make_up_the_rows(packing: bool, zigzag: bool) -> None:
    whole = causal(packing, [[3, 4], [5]] if packing else [[7], [5]])
    total: dict[int, int] = {}
    weights = torch.zeros(())
    for rank in range(2):
        part, layout = split_batch(whole, 2, rank, zigzag)
        mask: Any = ContextRows(layout, None, torch.device("cpu"))  # type: ignore[arg-type]
        numbers, mine = grouped(type(part)(**{**vars(part), "attention_mask": mask}), "document")
        weights = weights + mine
        for number in numbers.tolist():
            total[number] = total.get(number, 0) + 1
    lengths = [n for n in total.items() if n[0] < len(weights) - 1]
    assert sorted(n for _, n in lengths) == ([3, 4, 5] if packing else [5, 7])
    assert float(weights.sum()) == (6.0 if packing else 4.0) and float(weights[-1]) == 0.0


def test_pairs_count_as_one() -> None:
    rows = Rows(True, [[7]])
    # One document: how long the chosen conversation is, then both.
    rows.tokens = [np.array([3, 1, 2, 3 | LEARNED, 4, 5, 6 | LEARNED], dtype=np.uint32)]
    batch = PreferenceLayout(0).collate(rows, rows.sequences, 0)
    numbers, weights = grouped(batch, "document")
    assert numbers.tolist() == [0, 0, 0, 1, 1, 1] and weights.tolist() == [0.5, 0.5, 0.0]
    assert grouped(batch, "micro_batch")[1].tolist() == [1.0, 0.0]


def test_classes() -> None:
    batch = RowBatch(torch.ones(2, 4).long(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), torch.tensor([0, 1]))
    numbers, weights = grouped(batch, "document")
    assert numbers.tolist() == [0, 0, 0, 0, 1, 1, 2, 2] and weights.tolist() == [1, 1, 0]
    tokens = Tokens()
    assert tokens.real is None
    tokens.set(numbers, weights)
    assert tokens.real is not None and tokens.real.tolist() == [True] * 6 + [False] * 2
