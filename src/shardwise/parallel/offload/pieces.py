"""Cuts sharded parameters into pieces that are updated at once, with their states in one blob.

A piece is a run of rows of neighbouring parameters, of bounded size whatever the parameters' sizes:
the buffers that pieces pass through are then small, and the copies large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.distributed.lazy_rows import window
from shardwise.optim.codecs import Codec, Kind, columns
from shardwise.optim.elementwise import codec_beside
from shardwise.optim.shards import first_column, first_row, local_of
from shardwise.parallel.offload.paging import Page
from shardwise.parallel.offload.pinned_memory import ALIGNMENT, aligned

Place = tuple[int, tuple[int, ...], torch.dtype]  # offset in a blob, shape, type


@dataclass
class ShardSegment:
    """Rows of one parameter's shard, and the places of their states in the piece's blob."""

    name: str
    parameter: nn.Parameter
    group: dict[str, Any]
    first: int  # index of the shard's first element in the full parameter
    stride: int  # the distance of rows there
    start: int
    stop: int
    shape: torch.Size
    codecs: dict[str, Codec]
    low: Place | None = None  # of the master's low half
    parts: dict[str, dict[str, Place]] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """The index of the first element in the full parameter."""
        return self.first + self.start * self.stride


@dataclass(eq=False)
class OffloadPiece:
    """Segments that are updated together; the page's first region is their blob."""

    segments: list[ShardSegment]
    page: Page
    eager: bool = False
    layouts: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # see launches.py

    @property
    def elements(self) -> int:
        """Elements of all segments together."""
        return sum(s.shape.numel() for s in self.segments)

    def blob(self) -> torch.Tensor:
        """The states in memory or mapped from their file."""
        region = self.page.regions[0]
        if region.buffer is not None:
            return region.buffer
        assert region.file is not None
        return region.file.mapped(region.offset, region.size)


def cut_pieces(
    order: Mapping[str, nn.Parameter],
    groups: list[dict[str, Any]],
    states: Sequence[str],
    kind: Kind,
    limit: int,
) -> list[OffloadPiece]:
    """Cuts the parameters, in order, into pieces of at most `limit` elements (or a few rows)."""
    group_of: dict[nn.Parameter, dict[str, Any]] = {}
    for group in groups:
        group_of |= dict.fromkeys(group["params"], group)
    pieces: list[OffloadPiece] = []
    room = 0
    for name, parameter in order.items():
        if parameter not in group_of:
            continue
        codecs = {state: codec_beside(parameter, kind, state) for state in states}
        shape = local_of(parameter).shape
        stride = columns(parameter.shape)
        first = first_row(parameter) * stride + first_column(parameter)
        width = columns(shape)
        # Where a parameter is cut, ranges begin on a page in every type of two bytes or more.
        unit = ALIGNMENT // math.gcd(ALIGNMENT, 2 * width)
        step = max(unit, limit // width // unit * unit)
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            size = torch.Size((stop - start, *shape[1:]))
            if room < size.numel() or not pieces:
                pieces.append(OffloadPiece([], Page([])))
                room = limit
            segment = ShardSegment(
                name, parameter, group_of[parameter], first, stride, start, stop, size, codecs
            )
            pieces[-1].segments.append(segment)
            room -= size.numel()
    return pieces


def lay_out(piece: OffloadPiece, states: Sequence[str], split: bool) -> int:
    """Assigns every part of every state its place in the blob; returns the blob's size."""
    end = 0

    def place(shape: Sequence[int], dtype: torch.dtype) -> Place:
        nonlocal end
        start = end
        end += aligned(torch.Size(shape).numel() * dtype.itemsize, 64)
        return start, tuple(shape), dtype

    for segment in piece.segments:
        if split:
            segment.low = place(segment.shape, torch.int16)
        for state in states:
            places = {}
            for part, (shape, dtype) in segment.codecs[state].shapes(segment.shape).items():
                places[part] = place(shape, dtype)
            segment.parts[state] = places
    return end


def view_at(blob: torch.Tensor, place: Place | None) -> torch.Tensor:
    """The tensor at a place of a blob."""
    assert place is not None
    offset, shape, dtype = place
    return blob[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def overlaps(
    segments: list[tuple[OffloadPiece, ShardSegment]], offset: Sequence[int], rows: torch.Tensor
) -> Iterator[tuple[OffloadPiece, ShardSegment, tuple[slice, ...], slice]]:
    """The segments that `rows`, from `offset` on, fall into: the range of each, and the rows."""
    start = offset[0]
    stop = start + len(rows)
    others = window(offset, rows)[1:]
    for piece, segment in segments:
        low = max(start, segment.start)
        high = min(stop, segment.stop)
        if low < high:
            target = (slice(low - segment.start, high - segment.start), *others)
            source = slice(low - start, high - start)
            yield piece, segment, target, source
