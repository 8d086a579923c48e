"""How a parameter of floats is kept as rows of few bits: what its module, and whoever fills it, must know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.nn.kernels.nf4 import RowFormat, dequantize, quantize


@dataclass(frozen=True)
class WeightPacking:
    """How one parameter is kept: the shape that files have, and the bytes of each row.

    Of rows that are cut (tensor parallelism) it is this rank's part: `form.columns` of them, from `start` on.
    """

    shape: torch.Size
    form: RowFormat
    start: int = 0

    @property
    def columns(self) -> slice:
        """What is kept of the rows of the files."""
        return slice(self.start, self.start + self.form.columns)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of floats → rows of the parameter."""
        return quantize(rows.reshape(-1, self.form.columns), self.form).view(*rows.shape[:-1], -1)

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the parameter → rows of floats."""
        return dequantize(rows.reshape(-1, self.form.row_bytes), self.form, dtype).view(*rows.shape[:-1], -1)


def packed_parameter(weight: torch.Tensor, packing: WeightPacking) -> nn.Parameter:
    """The frozen parameter for a weight: empty on `meta`, otherwise with the weight's values."""
    if weight.is_meta:
        packed = torch.empty(*weight.shape[:-1], packing.form.row_bytes, dtype=torch.int8, device="meta")
    else:
        packed = packing.pack(weight.detach())
    return nn.Parameter(packed, requires_grad=False)
