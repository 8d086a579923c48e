"""Quantised weights in plain PyTorch: the reference of the Triton kernels, and what runs on a CPU.

It processes a few rows at a time that stay in the cache. A byte of codes is looked up as a pair of floats, read as one
8-byte number: 0.5 ns a weight on a core, half of what two look-ups take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

Bits = Literal["nf4", "int8", "fp8"]
BLOCK = 64
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# For rounding to a level: [-1, 1] in so many cells that no cell has two edges between levels (0.085 apart at least).
CELLS = 64
PIECE = {"cpu": 1 << 15, "cuda": 1 << 24}  # weights worked on at once: 128 KiB of fp32, what a core's cache holds
SMALLEST = torch.finfo(torch.float32).tiny
FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


@dataclass(frozen=True)
class RowFormat:
    """How a row of `columns` floats is stored in bytes; see the note in nf4.py."""

    columns: int
    bits: Bits = "nf4"
    double: bool = True

    @property
    def blocks(self) -> int:
        """Number of blocks in a row."""
        return -(-self.columns // BLOCK)

    @property
    def code_bytes(self) -> int:
        """Where the codes end and the scales begin."""
        if self.bits == "nf4":
            return self.blocks * BLOCK // 2
        multiple = 4 if self.bits == "int8" else 16
        return -(-self.columns // multiple) * multiple

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        if self.bits != "nf4":
            return self.code_bytes + (4 if self.bits == "int8" else 16)
        scales = 4 + self.blocks if self.double else 4 * self.blocks
        return self.code_bytes + -(-scales // 4) * 4


def quantize_into(out: torch.Tensor, x: torch.Tensor, form: RowFormat) -> None:
    """Quantises (rows, columns) floats to (rows, row_bytes) int8."""
    if form.bits != "nf4":
        write = _quantize_steps if form.bits == "int8" else _quantize_floats
        for rows in _pieces(x, form):
            write(out[rows], x[rows].float(), form)
        return
    scales = torch.empty(len(x), form.blocks, device=x.device)
    for rows in _pieces(x, form):
        piece = torch.nn.functional.pad(x[rows].float(), (0, form.blocks * BLOCK - form.columns)).view(-1, BLOCK)
        largest = piece.abs().amax(1)
        codes = _nearest(piece * torch.where(largest > 0, largest.reciprocal(), 0.0)[:, None]).view(-1, 2)
        pairs = (codes[:, 0] | (codes[:, 1] << 4)).to(torch.uint8)
        out[rows, : form.code_bytes] = pairs.view(torch.int8).view(-1, form.code_bytes)
        scales[rows] = largest.view(-1, form.blocks)
    write_scales(out, scales, form)


def dequantize_into(out: torch.Tensor, packed: torch.Tensor, form: RowFormat) -> None:
    """Dequantises (rows, row_bytes) int8 to (rows, columns) floats."""
    if form.bits != "nf4":
        for rows in _pieces(out, form):
            codes = packed[rows, : form.columns]
            out[rows] = (codes if form.bits == "int8" else codes.view(FLOAT8).float()) * row_scales(packed[rows], form)
        return
    scales = read_scales(packed, form).reshape(len(packed), form.blocks, 1)
    for rows in _pieces(out, form):
        codes = packed[rows, : form.code_bytes].view(torch.uint8).to(torch.int32).view(-1)
        values = torch.index_select(_pairs(str(out.device)), 0, codes).view(torch.float32).view(-1, form.blocks, BLOCK)
        values *= scales[rows]
        out[rows] = values.flatten(1)[:, : form.columns]


def row_scales(packed: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Returns the fp32 scales (rows, 1) of int8's and fp8's rows."""
    return packed[:, form.code_bytes : form.code_bytes + 4].view(torch.float32)


def float8_scales(packed: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Returns the scale of each row in fp8, (rows, 1) in fp32: nf4's largest block maps to the format's largest."""
    if form.bits != "nf4":
        return row_scales(packed, form)
    if not form.double:
        return read_scales(packed, form).amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    low, step = packed[:, form.code_bytes : form.code_bytes + 4].view(torch.float16).float().split(1, 1)
    return _in_double(torch.exp2, 255 * step + low) / LARGEST


def as_float8(packed: torch.Tensor, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows in fp8 and their scales; nf4's are rounded once more."""
    scales = float8_scales(packed, form)
    if form.bits == "fp8":
        return packed[:, : form.columns].view(FLOAT8), scales
    out = torch.empty(len(packed), form.columns, device=packed.device)
    dequantize_into(out, packed, form)
    return (out / scales).clamp_(-LARGEST, LARGEST).to(FLOAT8), scales


def write_scales(packed: torch.Tensor, scales: torch.Tensor, form: RowFormat) -> None:
    """Stores the fp32 scales (rows, blocks) of nf4's blocks behind their codes."""
    tail = packed[:, form.code_bytes :]
    if not form.double:
        tail.view(torch.float32)[:] = scales
        return
    octaves = _in_double(torch.log2, scales.clamp(min=SMALLEST))
    # A block of zeros has codes of 0, so any scale serves; it must not widen the row's spread.
    low = torch.where(scales == 0, torch.inf, octaves).amin(1, keepdim=True)
    low = torch.where(low == torch.inf, 0.0, low)
    # Rounded to fp16 outwards, so that the smallest and the largest scale are within the codes.
    low = (low - low.abs() * 2**-10).to(torch.float16)
    step = ((octaves.amax(1, keepdim=True) - low.float()).clamp(min=0) / 255 * (1 + 2**-10)).to(torch.float16)
    width = step.float()
    codes = ((octaves - low.float()) * torch.where(width == 0, 0.0, width.reciprocal())).round_()
    tail[:, :4].view(torch.float16)[:] = torch.cat([low, step], 1)
    tail[:, 4 : 4 + form.blocks] = codes.nan_to_num_(0.0).clamp_(0, 255).to(torch.uint8).view(torch.int8)


def read_scales(packed: torch.Tensor, form: RowFormat) -> torch.Tensor:
    """Returns the fp32 scales (rows, blocks) of nf4's blocks."""
    tail = packed[:, form.code_bytes :]
    if not form.double:
        return tail.view(torch.float32)
    low, step = tail[:, :4].view(torch.float16).float().split(1, 1)
    return _in_double(torch.exp2, tail[:, 4 : 4 + form.blocks].view(torch.uint8) * step + low)


def _in_double(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """On a CPU the last bit of such a function depends on an element's position in the tensor, and so on sharding."""
    return function(x.double()).float() if x.device.type == "cpu" else function(x)


def _quantize_steps(out: torch.Tensor, x: torch.Tensor, form: RowFormat) -> None:
    scale = x.abs().amax(1, keepdim=True) / 127
    codes = (x * torch.where(scale > 0, scale.reciprocal(), 0.0)).round_().clamp_(-127, 127)
    out[:, : form.columns] = codes.nan_to_num_(0.0).to(torch.int8)
    row_scales(out, form)[:] = scale


def _quantize_floats(out: torch.Tensor, x: torch.Tensor, form: RowFormat) -> None:
    scale = x.abs().amax(1, keepdim=True) / LARGEST
    codes = (x * torch.where(scale > 0, scale.reciprocal(), 0.0)).clamp_(-LARGEST, LARGEST).to(FLOAT8)
    out[:, : form.columns] = codes.view(torch.int8)
    row_scales(out, form)[:] = scale


def _nearest(y: torch.Tensor) -> torch.Tensor:
    """The code of the level nearest to each number in [-1, 1], as int32: how many edges are below it."""
    base, edge = _cells(str(y.device))
    cell = _cell_of(y).view(-1)
    below = torch.index_select(base, 0, cell).view_as(y)
    return below.add_(y > torch.index_select(edge, 0, cell).view_as(y))


def _cell_of(y: torch.Tensor) -> torch.Tensor:
    return ((y + 1) * (CELLS / 2)).to(torch.int32).clamp_(0, CELLS)


@lru_cache
def levels(device: str) -> torch.Tensor:
    """Returns the value of each code, in fp32."""
    return torch.tensor(LEVELS, device=device)


@lru_cache
def edges(device: str = "cpu") -> torch.Tensor:
    """Returns the midpoints between the levels, in fp32."""
    values = levels("cpu")
    return ((values[1:] + values[:-1]) / 2).to(device)


@lru_cache
def _cells(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """For each cell: how many edges are in the cells before it, and the edge within it."""
    edge_cells = _cell_of(edges())
    base = torch.tensor([int((edge_cells < cell).sum()) for cell in range(CELLS + 1)], dtype=torch.int32)
    edge = torch.full((CELLS + 1,), torch.inf)
    edge[edge_cells.long()] = edges()
    return base.to(device), edge.to(device)


@lru_cache
def _pairs(device: str) -> torch.Tensor:
    """The value of each byte: two fp32 levels, read as one fp64 number that nothing computes with."""
    byte = torch.arange(256)
    values = levels("cpu")
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).view(torch.float64).view(-1).to(device)


def _pieces(x: torch.Tensor, form: RowFormat) -> Iterator[slice]:
    rows = max(1, PIECE.get(x.device.type, 1 << 24) // max(1, form.columns))
    for start in range(0, x.shape[0], rows):
        yield slice(start, start + rows)
