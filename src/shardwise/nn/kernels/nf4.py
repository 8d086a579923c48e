"""Weights in few bits: each row of a matrix becomes a row of bytes that holds its own scales.

[Note: rows of few bits] A row can be read without its neighbours, so sharding by rows gives every rank whole weights,
one integer parameter stands for the matrix, and nothing (mixed precision, a collective) takes its scales for floats to
be rounded. The columns are cut into blocks of BLOCK, the last one filled up with zeros.
  nf4           codes, element 2j in the low half of byte j; then one fp32 scale per block         4.5 bits a weight
  nf4, double   codes; then fp16 `low` and `step`; then one byte per block: the scale is
                2^(low + byte · step)                                                4.125 + 32/columns bits a weight
  int8          codes of ±127 steps; then one fp32 scale for the row                     8 + 32/columns bits a weight
  fp8           e4m3 numbers; then one fp32 scale for the row                           8 + 128/columns bits a weight
Rows are filled up to a multiple of 4 bytes, so that scales and codes can be read as words; those of fp8 to a multiple
of 16, so that a GPU multiplies with them where they lie (nn/adapters/lora_float8.py).

[Note: levels] NF4's 16 levels are the means of equal shares of a normal distribution, scaled to ±1 with an exact 0;
weights are near normal, so each code is used about as often. They are the ones of the QLoRA paper (arXiv 2305.14314).

[Note: scales of scales] Bytes count in octaves: whatever the spread of a row's scales, each is off by the same share at
most, 2^(spread/510): 0.14% for the spread of one octave that normal weights have. With equal distances a single
outlier in the row would cost its small blocks their precision.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.effective_device import stands_in
from shardwise.nn.kernels import nf4_reference as reference
from shardwise.nn.kernels.nf4_reference import BLOCK, LEVELS, Bits, RowFormat

__all__ = ["BLOCK", "LEVELS", "Bits", "RowFormat", "as_float8", "dequantize", "float8_scales", "quantize"]


def quantize(x: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Quantises (rows, columns) floats to (rows, row_bytes) int8."""
    out = torch.zeros(x.shape[0], form.row_bytes, dtype=torch.int8, device=x.device)
    if x.numel() and not stands_in():
        _backend(x).quantize_into(out, x, form)
    return out


def dequantize(packed: torch.Tensor, form: RowFormat, dtype: torch.dtype) -> torch.Tensor:
    """Dequantises (rows, row_bytes) int8 to (rows, columns) floats; computed in fp32 and rounded once."""
    assert packed.dtype == torch.int8, f"packed weights were cast to {packed.dtype}"
    out = torch.empty(packed.shape[0], form.columns, dtype=dtype, device=packed.device)
    if out.numel() and not stands_in():
        _backend(out).dequantize_into(out, packed, form)
    return out


def as_float8(packed: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rows, row_bytes) int8 as (rows, columns) in fp8, and the scale of each row, (rows, 1) in fp32.

    fp8 rows are views; those of nf4, whose levels and scales have more bits, are rounded once more.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _backend(packed).as_float8(packed, form)
    return result


def float8_scales(packed: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Returns the scales of `as_float8`."""
    scales: torch.Tensor = _backend(packed).float8_scales(packed, form)
    return scales


def _backend(tensor: torch.Tensor) -> Any:
    if tensor.is_cuda:
        from shardwise.nn.kernels import nf4_triton

        return nf4_triton
    return reference
