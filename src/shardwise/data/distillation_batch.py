"""Batches for learning from a teacher: where the learned tokens are and, if it was asked before, what it answered.

[Note: answers] What a teacher thinks of each learned token is its k likeliest tokens with their log-probabilities and
the log-probability of all others together, at temperature 1: 8k + 4 bytes. It lies in a file for each chunk of tokens,
in the order of the tokens, in a folder named by all that it follows from: the teacher's files, k, the tokens. A file
is renamed into place when it is whole, and mapped when it is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.core.labels import IGNORE
from shardwise.data.layout import CausalLayout
from shardwise.data.loader import MicroBatch
from shardwise.data.store import OPEN, TokenStore, mapped


@dataclass(frozen=True, kw_only=True)
class DistillationBatch(MicroBatch):
    """`places`: the positions, rows laid end to end, that predict a learned token.

    For each the teacher's likeliest tokens (places, k) and log-probabilities (places, k + 1), if it was asked before.
    """

    places: torch.Tensor
    likeliest: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None


class TeacherAnswers:
    """What a teacher has answered, by store and chunk; see [Note: answers]."""

    def __init__(self, root: Path, k: int) -> None:
        self.root, self.k = root, k
        self._open: OrderedDict[Path, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def file(self, store: TokenStore, chunk: int) -> Path:
        """Where the answers for a chunk are, or will be."""
        return self.root / store.folder.parent.name / store.folder.name / f"{chunk:07}.npy"

    def of(self, store: TokenStore, chunk: int, index: int) -> np.ndarray:
        """One line for each learned token of a document: k tokens, then the bits of k + 1 log-probabilities."""
        file = self.file(store, chunk)
        if file not in self._open:
            starts = np.concatenate([[0], np.cumsum(store.table(chunk)["supervised"], dtype=np.int64)])
            self._open[file] = mapped(file).view(np.int32).reshape(-1, 2 * self.k + 1), starts
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(file)
        lines, starts = self._open[file]
        return lines[starts[index] : starts[index + 1]]


class DistillationLayout(CausalLayout):
    """Causal rows, with what a teacher has answered if there is such."""

    def __init__(self, pad_id: int, answers: TeacherAnswers | None = None) -> None:
        super().__init__(pad_id)
        self._answers = answers

    def collate(self, reader: Any, sequences: Sequence[np.ndarray], epoch: int) -> DistillationBatch:
        """As for causal rows; `reader` is a loader, whose sources say which store a document is of."""
        rows = super().collate(reader, sequences, epoch)
        known: dict[str, Any] = {f.name: getattr(rows, f.name) for f in fields(rows)}
        known["places"] = torch.from_numpy(np.flatnonzero(rows.labels.numpy() != IGNORE))
        if self._answers is not None:
            places = [d for documents in sequences for d in documents[["source", "chunk", "index"]].tolist()]
            lines = np.concatenate([self._answers.of(reader.sources[s].store, c, i) for s, c, i in places])
            k = self._answers.k
            known["likeliest"] = torch.from_numpy(lines[:, :k].astype(np.int64))
            known["log_probs"] = torch.from_numpy(np.ascontiguousarray(lines[:, k:]).view(np.float32))
        return DistillationBatch(**known)
