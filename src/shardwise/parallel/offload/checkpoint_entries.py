"""Checkpoint entries of offloaded states: the same names, shapes and shards as without offload.

They are read and written row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.distributed.lazy_rows import LazyShardedTensor, outline, window
from shardwise.optim.codecs import SharedBlocks, columns, part_name
from shardwise.optim.shards import local_of, placements_along
from shardwise.optim.split_master import join, split_
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.offload.parameters import ParameterOffload
from shardwise.parallel.offload.pieces import OffloadPiece, ShardSegment, overlaps, view_at

Segments = list[tuple[OffloadPiece, ShardSegment]]
JOIN_ELEMENTS = 4 << 20  # of a split master, joined at a time: the device may be full


def entries(optimizer: OffloadedOptimizer, model: nn.Module | None = None) -> dict[str, Any]:
    """Every state as `optimizer.<parameter>.<state>`, and `masters` as `model.<parameter>`.

    With the model, frozen parameters too.
    """
    optimizer.finish()
    result: dict[str, Any] = {}
    for name, rows in masters(optimizer, model).items():
        result[f"model.{name}"] = rows
    for parameter, name, segments in _segments(optimizer):
        result[f"optimizer.{name}.step"] = _step(optimizer)
        for state in optimizer.rule.states:
            for part in segments[0][1].parts[state]:
                key = f"optimizer.{name}.{part_name(state, part)}"
                result[key] = _state(optimizer, parameter, segments, state, part)
    return result


def masters(
    optimizer: OffloadedOptimizer, model: nn.Module | None = None
) -> dict[str, LazyShardedTensor]:
    """Readers and writers, by name, of the parameters that are split or not on the device.

    With the model, frozen parameters too.
    """
    offload = optimizer.parameter_offload
    if not optimizer.split and offload is None:
        return {}
    result = {}
    for parameter, name, segments in _segments(optimizer):
        result[name] = _master(optimizer, parameter, segments)
    if offload is not None and model is not None:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                result[name] = _frozen(offload, parameter)
    return result


def _frozen(offload: ParameterOffload, parameter: nn.Parameter) -> LazyShardedTensor:
    """A parameter that is off the device and not in the optimizer."""

    def write(offset: Sequence[int], rows: torch.Tensor) -> None:
        offload.view(parameter)[window(offset, rows)].copy_(rows)

    local_shape = tuple(local_of(parameter).shape)
    full = outline(parameter, tuple(parameter.shape), local_shape, parameter.dtype)
    return LazyShardedTensor(full, lambda: [offload.view(parameter)], write)


def _segments(optimizer: OffloadedOptimizer) -> list[tuple[nn.Parameter, str, Segments]]:
    result = []
    for parameter, pieces in optimizer.pieces_of.items():
        segments: Segments = []
        for piece in pieces:
            segments += [(piece, s) for s in piece.segments if s.parameter is parameter]
        result.append((parameter, optimizer.names[parameter], segments))
    return result


def _step(optimizer: OffloadedOptimizer) -> LazyShardedTensor:
    def read() -> list[torch.Tensor]:
        return [torch.tensor(float(optimizer.steps))]

    def write(offset: Sequence[int], value: torch.Tensor) -> None:
        optimizer.steps = int(value)

    return LazyShardedTensor(torch.zeros(()), read, write, optimizer.resident)


def _state(
    optimizer: OffloadedOptimizer,
    parameter: nn.Parameter,
    segments: Segments,
    state: str,
    part: str,
) -> LazyShardedTensor:
    def parts() -> Iterator[torch.Tensor]:
        for piece, segment in segments:
            yield view_at(piece.blob(), segment.parts[state][part])

    def write(offset: Sequence[int], rows: torch.Tensor) -> None:
        for piece, segment, target, source in overlaps(segments, offset, rows):
            view_at(piece.blob(), segment.parts[state][part])[target].copy_(rows[source])

    codec = segments[0][1].codecs[state]
    full_shape, dtype = codec.shapes(parameter.shape)[part]
    local_shape, _ = codec.shapes(local_of(parameter).shape)[part]
    placements = None
    if isinstance(codec, SharedBlocks) and part == "scales":  # full rows
        assert isinstance(parameter, DTensor)
        placements = placements_along(parameter, (0,))
    full = outline(parameter, full_shape, local_shape, dtype, placements)
    return LazyShardedTensor(full, parts, write, optimizer.resident)


def _master(
    optimizer: OffloadedOptimizer, parameter: nn.Parameter, segments: Segments
) -> LazyShardedTensor:
    def home() -> torch.Tensor:
        offload = optimizer.parameter_offload
        return local_of(parameter) if offload is None else offload.view(parameter)

    def parts() -> Iterator[torch.Tensor]:
        if not optimizer.split:
            yield home()
            return
        for piece, segment in segments:
            high = home()[segment.start : segment.stop]
            low = view_at(piece.blob(), segment.low)
            if optimizer.resident is None:
                high = high.cpu()
                low = low.cpu()
            rows = max(1, JOIN_ELEMENTS // columns(high.shape))
            for start in range(0, len(high), rows):
                yield join(high[start : start + rows], low[start : start + rows])

    def write(offset: Sequence[int], rows: torch.Tensor) -> None:
        if not optimizer.split:
            home()[window(offset, rows)].copy_(rows)
            return
        for piece, segment, target, source in overlaps(segments, offset, rows):
            part = rows[source].float().clone()
            high = torch.empty_like(part, dtype=torch.bfloat16)
            low = torch.empty_like(part, dtype=torch.int16)
            split_(part, high, low)
            highs = home()[segment.start : segment.stop][target]
            highs.copy_(high)
            view_at(piece.blob(), segment.low)[target].copy_(low)

    local_shape = tuple(local_of(parameter).shape)
    full = outline(parameter, tuple(parameter.shape), local_shape, torch.float32)
    return LazyShardedTensor(full, parts, write, optimizer.resident)
