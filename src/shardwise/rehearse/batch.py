"""Batches of the shapes that a run's data will have, without the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shardwise.config.resolve import purpose_of
from shardwise.config.schema import Run
from shardwise.data.layout import CausalLayout
from shardwise.data.loader import StepBatch
from shardwise.data.packing import DOCUMENT
from shardwise.data.rows import RowBatch
from shardwise.data.store import LEARNED

FIRST = 3  # ids before it are special


class _Reader:
    """Every document is learned but for its first token."""

    source_count = 1

    def __init__(self, packing: bool, length: int) -> None:
        self.packing, self._length = packing, length

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        tokens = np.full(self._length, FIRST, dtype=np.uint32)
        tokens[1:] |= LEARNED
        return tokens


def micro_batch(run: Run, rows: int, documents: int = 1) -> Any:
    """Full rows, of `documents` each where rows are packed; every position is learned, the most there can be."""
    width = run.data.sequence_length
    if purpose_of(run) == "causal":
        count = documents if run.data.packing and width % documents == 0 else 1
        reader, each = _Reader(run.data.packing, width // count), np.zeros(count, dtype=DOCUMENT)
        each["length"] = width // count
        made = CausalLayout(0).collate(reader, [each] * rows, 0)
        return replace(made, labels=torch.full_like(made.labels, FIRST))
    ids = torch.full((rows, width), FIRST)
    return RowBatch(ids, torch.ones_like(ids), torch.full_like(ids, FIRST))


def step_batch(run: Run, micro_batches: int, documents: int = 1) -> StepBatch:
    """What a rank gets in a step."""
    micro = micro_batch(run, int(run.train.micro_batch_size), documents)
    tokens = micro_batches * micro.input_ids.numel()
    return StepBatch([micro] * micro_batches, tokens, tokens, 0.0, (tokens,))
