"""Groups a piece's segments into AdamW launches: adapters have hundreds of small segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.optim.codecs import FP32
from shardwise.optim.shards import local_of
from shardwise.parallel.offload.pieces import OffloadPiece, ShardSegment

LEAST_SEGMENTS = 4  # fewer are launched one by one
GRADIENT_DTYPES = (torch.bfloat16, torch.float32)


@dataclass
class Launch:
    """Segments of one parameter group, their gradients, and where their states are in the blob."""

    segments: list[ShardSegment]
    gradients: list[torch.Tensor]
    layout: torch.Tensor


def group_launches(
    piece: OffloadPiece, gradient: Callable[[nn.Parameter], torch.Tensor | None], blob: torch.Tensor
) -> tuple[list[Launch], list[ShardSegment]]:
    """Launches for a piece with fp32 states and split masters, and the segments in none of them."""
    if not blob.is_cuda or len(piece.segments) < LEAST_SEGMENTS:
        return [], piece.segments
    groups: dict[tuple[int, torch.dtype], dict[int, torch.Tensor]] = {}
    for number, segment in enumerate(piece.segments):
        full = gradient(segment.parameter)
        if full is None or full.dtype not in GRADIENT_DTYPES:
            continue
        if segment.codecs["exp_avg"] is not FP32:
            continue
        rows = local_of(full)[segment.start : segment.stop]
        if rows.is_contiguous():
            groups.setdefault((id(segment.group), full.dtype), {})[number] = rows
    launches = []
    remaining = dict(enumerate(piece.segments))
    for rows_of in groups.values():
        if len(rows_of) < LEAST_SEGMENTS:
            continue
        numbers = tuple(rows_of)
        segments = [remaining.pop(number) for number in numbers]
        layout = piece.layouts.get(numbers)
        if layout is None:
            layout = _layout(segments).to(blob.device)
            piece.layouts[numbers] = layout
        launches.append(Launch(segments, list(rows_of.values()), layout))
    return launches, list(remaining.values())


def _layout(segments: list[ShardSegment]) -> torch.Tensor:
    """Of each segment, its elements and the offsets of its low half and its moments in the blob."""
    rows = []
    for segment in segments:
        assert segment.low is not None
        mean = segment.parts["exp_avg"][""]
        square = segment.parts["exp_avg_sq"][""]
        rows.append([segment.shape.numel(), segment.low[0], mean[0], square[0]])
    return torch.tensor(rows, dtype=torch.int64)
