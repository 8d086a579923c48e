"""Batches with the shapes of a run's data, without the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shardwise.config.resolve import purpose_of
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.data.layout import CausalLayout
from shardwise.data.loader import StepBatch
from shardwise.data.packing import DOCUMENT
from shardwise.data.rows import RowBatch
from shardwise.data.store import LEARNED

FIRST = 3  # ids before it are special
PACKED = 0  # for a number of documents: a long one and a short one, as in rows that are packed somehow
SHORT = 16  # tokens of that one


class _DocumentReader:
    """Reader whose documents are trained on except for their first token; an index is a length."""

    source_count = 1

    def __init__(self, packing: bool) -> None:
        self.packing = packing

    def marked(self, source: int, chunk: int, index: int) -> np.ndarray:
        tokens = np.full(index, FIRST, dtype=np.uint32)
        tokens[1:] |= LEARNED
        return tokens


def micro_batch(run: Run, rows: int, documents: int = 1) -> Any:
    """Returns full rows, with `documents` each if packed; every position is a loss token, the worst case."""
    width = run.data.sequence_length
    if purpose_of(run) == "causal":
        lengths = _lengths(width, documents, bool(run.data.packing))
        row_documents = np.array([(0, 0, length, length, 0) for length in lengths], DOCUMENT)
        batch = CausalLayout(0).collate(_DocumentReader(bool(run.data.packing)), [row_documents] * rows, 0)
        return replace(batch, labels=torch.full_like(batch.labels, FIRST))
    ids = torch.full((rows, width), FIRST)
    return RowBatch(ids, torch.ones_like(ids), torch.full_like(ids, FIRST))


def check_division(run: Run, documents: int) -> None:
    """Raises an error if rows cannot be divided into this many documents."""
    width = run.data.sequence_length
    fits = documents == 1 or (run.data.packing and documents > 1 and width > 2 * SHORT and width % documents == 0)
    if not fits:
        problem = f"rows of {width} tokens{'' if run.data.packing else ', not packed,'} cannot be divided into so many"
        raise UserError("--documents", documents, problem, "use 1" if width <= 2 * SHORT else "e.g. 8")


def _lengths(width: int, documents: int, packing: bool) -> list[int]:
    if not packing or documents == 1 or width <= 2 * SHORT:
        return [width]
    if documents == PACKED:
        return [width - SHORT, SHORT]
    return [width // documents] * documents if width % documents == 0 else [width]


def step_batch(run: Run, micro_batches: int, documents: int = 1) -> StepBatch:
    """Returns the batch of one rank and step."""
    micro = micro_batch(run, int(run.train.micro_batch_size), documents)
    tokens = micro_batches * micro.input_ids.numel()
    return StepBatch([micro] * micro_batches, tokens, tokens, 0.0, (tokens,))
