"""Document boundaries in packed rows.

Boundaries are known on the host when the batch is collated and travel with it; a T x T mask is never needed
(nn/attention/document_mask.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class Documents:
    """Document boundaries of packed rows; padding at the end of a row counts as one more document."""

    rows: int
    width: int
    lengths: tuple[int, ...]  # row by row; a document never goes on in the next row
    boundaries: torch.Tensor  # int32: starts within the rows laid end to end, and the end
    # Plain values rather than properties: a compiled block would be compiled anew for every other tuple of lengths.
    longest: int
    alone: bool  # each row is one document

    @classmethod
    def of_positions(cls, positions: np.ndarray | torch.Tensor) -> Documents:
        """From position ids on the host, (rows, width): a document begins where they do not increase by one."""
        table = np.asarray(positions)
        starts = np.ones(table.shape, dtype=bool)
        starts[:, 1:] = np.diff(table, axis=1) != 1
        return cls._of_starts(np.flatnonzero(starts), *table.shape)

    @classmethod
    def of_lengths(cls, rows: Sequence[Sequence[int]]) -> Documents:
        """From the document lengths of each row; rows that are not full end in a padding document."""
        width = max(sum(row) for row in rows)
        starts = [i * width + sum(row[:n]) for i, row in enumerate(rows) for n in range(len(row) + (sum(row) < width))]
        return cls._of_starts(np.array(starts), len(rows), width)

    @classmethod
    def _of_starts(cls, starts: np.ndarray, rows: int, width: int) -> Documents:
        bounds = np.append(starts, rows * width).astype(np.int32)
        lengths = tuple(np.diff(bounds).tolist())
        return cls(rows, width, lengths, torch.from_numpy(bounds), max(lengths), len(lengths) == rows)

    def to(self, device: torch.device) -> Documents:
        """Copy with the boundaries on `device`."""
        return replace(self, boundaries=self.boundaries.to(device, non_blocking=True))

    @cached_property
    def index(self) -> torch.Tensor:
        """Document index of each token, (rows, width), on the device, without a host sync."""
        bounds = self.boundaries.long()
        numbers = torch.arange(len(self.lengths), device=bounds.device)
        total = self.rows * self.width
        return numbers.repeat_interleave(bounds.diff(), output_size=total).view(self.rows, self.width)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token within its document, (rows, width), on the device."""
        flat = torch.arange(self.rows * self.width, device=self.boundaries.device).view(self.rows, self.width)
        return flat - self.boundaries.long()[self.index]

    @cached_property
    def spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin and end of each token's document in the flattened rows, int32, on the device."""
        index = self.index.flatten()
        return self.boundaries[index], self.boundaries[index + 1]
