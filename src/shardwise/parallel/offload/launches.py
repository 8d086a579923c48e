"""Which segments of a piece one launch of AdamW can update: hundreds of small ones, as adapters have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.optim.codecs import FP32
from shardwise.optim.shards import local_of
from shardwise.parallel.offload.pieces import OffloadPiece, ShardSegment

SEVERAL = 4  # fewer are launched one by one
KINDS = (torch.bfloat16, torch.float32)  # of gradients


@dataclass
class Launch:
    """Segments of one group of parameters, their gradients, and where in the blob their states lie."""

    segments: list[ShardSegment]
    gradients: list[torch.Tensor]
    layout: torch.Tensor


def by_launch(
    piece: OffloadPiece, gradient: Callable[[nn.Parameter], torch.Tensor | None], blob: torch.Tensor
) -> tuple[list[Launch], list[ShardSegment]]:
    """Launches for a piece whose states are fp32 beside split masters, and the segments that none of them has."""
    if not blob.is_cuda or len(piece.segments) < SEVERAL:
        return [], piece.segments
    found: dict[tuple[int, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for number, segment in enumerate(piece.segments):
        whole = gradient(segment.parameter)
        if whole is not None and whole.dtype in KINDS and segment.codecs["exp_avg"] is FP32:
            rows = local_of(whole)[segment.start : segment.stop]
            if rows.is_contiguous():
                found.setdefault((id(segment.group), whole.dtype), []).append((number, rows))
    launches, left = [], set(range(len(piece.segments)))
    for taken in found.values():
        numbers = tuple(number for number, _ in taken)
        if len(numbers) >= SEVERAL:
            segments = [piece.segments[number] for number in numbers]
            layout = piece.layouts.get(numbers)
            if layout is None:
                layout = piece.layouts[numbers] = _layout(segments).to(blob.device)
            launches.append(Launch(segments, [rows for _, rows in taken], layout))
            left -= set(numbers)
    return launches, [piece.segments[number] for number in sorted(left)]


def _layout(segments: list[ShardSegment]) -> torch.Tensor:
    """For each segment its elements, and where in the blob its low half and its moments begin."""
    rows = []
    for segment in segments:
        assert segment.low is not None
        moments = [segment.parts[state][""][0] for state in ("exp_avg", "exp_avg_sq")]
        rows.append([segment.shape.numel(), segment.low[0], *moments])
    return torch.tensor(rows, dtype=torch.int64)
