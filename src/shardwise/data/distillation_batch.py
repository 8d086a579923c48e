"""Batches for distillation: the positions of the loss tokens and, if precomputed, the teacher's predictions for them.

[Note: answers] The teacher's prediction for a loss token is its top-k tokens with their log-probabilities and the
log-probability of all others together, at temperature 1: 8k + 4 bytes. Predictions are stored in one file per chunk of
tokens, in token order, in a folder keyed by everything they depend on: the teacher's files, k and the tokens. A file is
renamed into place once complete, and memory-mapped when read.
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
    """Causal batch with `places`, the positions in the flattened rows that predict a loss token.

    For each position: the teacher's top-k tokens (places, k) and log-probabilities (places, k + 1), if precomputed.
    `asked` is what a teacher that is not precomputed says of the positions that this rank has: top-k tokens (None: all
    tokens) and log-probabilities.
    """

    places: torch.Tensor
    likeliest: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    asked: tuple[torch.Tensor | None, torch.Tensor] | None = None


class TeacherAnswers:
    """Precomputed teacher predictions by store and chunk; see [Note: answers]."""

    def __init__(self, root: Path, k: int) -> None:
        self.root, self.k = root, k
        self._open: OrderedDict[Path, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def file(self, store: TokenStore, chunk: int) -> Path:
        """Path of the predictions for a chunk, whether or not they exist yet."""
        return self.root / store.folder.parent.name / store.folder.name / f"{chunk:07}.npy"

    def of(self, store: TokenStore, chunk: int, index: int) -> np.ndarray:
        """One row per loss token of a document: k token ids, then the bits of k + 1 log-probabilities."""
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
    """Causal layout that adds precomputed teacher predictions, if any."""

    def __init__(self, pad_id: int, answers: TeacherAnswers | None = None) -> None:
        super().__init__(pad_id)
        self._answers = answers

    def collate(self, reader: Any, sequences: Sequence[np.ndarray], epoch: int) -> DistillationBatch:
        """Collates as the causal layout does; `reader` is a loader, whose sources name the token stores."""
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
