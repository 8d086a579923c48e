"""How a parameter of floats is stored as quantised rows: what its module, and whoever fills it, must know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.nn.kernels.nf4 import RowFormat, dequantize, quantize


@dataclass(frozen=True)
class WeightPacking:
    """How one parameter is stored: the shape in the files, and the format of each row.

    With tensor parallelism over rows it is this rank's shard: `form.columns` of them, from `start` on.
    """

    shape: torch.Size
    form: RowFormat
    start: int = 0

    @property
    def columns(self) -> slice:
        """The columns of the rows in the files that are stored."""
        return slice(self.start, self.start + self.form.columns)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Quantises rows of floats."""
        return quantize(rows.reshape(-1, self.form.columns), self.form).view(*rows.shape[:-1], -1)

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantises rows of the parameter."""
        return dequantize(rows.reshape(-1, self.form.row_bytes), self.form, dtype).view(*rows.shape[:-1], -1)


def packed_parameter(weight: torch.Tensor, packing: WeightPacking) -> nn.Parameter:
    """Returns the frozen parameter for a weight: empty on `meta`, otherwise with the weight's values."""
    if weight.is_meta:
        packed = torch.empty(*weight.shape[:-1], packing.form.row_bytes, dtype=torch.int8, device="meta")
    else:
        packed = packing.pack(weight.detach())
    return nn.Parameter(packed, requires_grad=False)
