"""Offloaded states in checkpoints: names, shapes and shards as without offload, read and written by rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.distributed.lazy_rows import Rows, outline
from shardwise.optim.codecs import columns, part_name
from shardwise.optim.shards import local_of
from shardwise.optim.split_master import join, split_
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.offload.parameters import ParameterOffload
from shardwise.parallel.offload.pieces import OffloadPiece, ShardSegment, at, overlaps

Segments = list[tuple[OffloadPiece, ShardSegment]]
JOINED = (
    4 << 20
)  # elements of a split master that are put together at a time: the device may be full


def entries(optimizer: OffloadedOptimizer, model: nn.Module | None = None) -> dict[str, Any]:
    """Every state as `optimizer.<parameter>.<state>`; parameters that are not whole on the device as `model.<…>`.

    With the model, frozen ones too.
    """
    optimizer.finish()
    found: dict[str, Any] = {
        f"model.{name}": rows for name, rows in masters(optimizer, model).items()
    }
    for parameter, name, segments in _segments(optimizer):
        found[f"optimizer.{name}.step"] = _step(optimizer)
        for state in optimizer.rule.states:
            for part in segments[0][1].parts[state]:
                key = f"optimizer.{name}.{part_name(state, part)}"
                found[key] = _state(optimizer, parameter, segments, state, part)
    return found


def masters(optimizer: OffloadedOptimizer, model: nn.Module | None = None) -> dict[str, Rows]:
    """By name, the parameters that are split or not on the device: where their values are read and written.

    With the model, frozen ones too.
    """
    if not optimizer.split and optimizer.shelf is None:
        return {}
    found = {
        name: _master(optimizer, parameter, segments)
        for parameter, name, segments in _segments(optimizer)
    }
    if optimizer.shelf is not None and model is not None:
        found |= {
            n: _frozen(optimizer.shelf, p)
            for n, p in model.named_parameters()
            if not p.requires_grad
        }
    return found


def _frozen(shelf: ParameterOffload, parameter: nn.Parameter) -> Rows:
    """A parameter that is off the device and that no optimizer knows."""

    def write(start: int, rows: torch.Tensor) -> None:
        shelf.view(parameter)[start : start + len(rows)].copy_(rows)

    mine = tuple(local_of(parameter).shape)
    whole = outline(parameter, tuple(parameter.shape), mine, parameter.dtype)
    return Rows(whole, lambda: [shelf.view(parameter)], write)


def _segments(optimizer: OffloadedOptimizer) -> list[tuple[nn.Parameter, str, Segments]]:
    return [
        (
            parameter,
            optimizer.names[parameter],
            [(p, s) for p in pieces for s in p.segments if s.parameter is parameter],
        )
        for parameter, pieces in optimizer.of.items()
    ]


def _step(optimizer: OffloadedOptimizer) -> Rows:
    def write(start: int, value: torch.Tensor) -> None:
        optimizer.steps = int(value)

    return Rows(
        torch.zeros(()), lambda: [torch.tensor(float(optimizer.steps))], write, optimizer.resident
    )


def _state(
    optimizer: OffloadedOptimizer,
    parameter: nn.Parameter,
    segments: Segments,
    state: str,
    part: str,
) -> Rows:
    def parts() -> Iterator[torch.Tensor]:
        return (at(p.blob(), s.parts[state][part]) for p, s in segments)

    def write(start: int, rows: torch.Tensor) -> None:
        for piece, segment, target, source in overlaps(segments, start, rows):
            at(piece.blob(), segment.parts[state][part])[target].copy_(rows[source])

    codec = segments[0][1].codecs[state]
    (whole, dtype), (mine, _) = (
        codec.shapes(parameter.shape)[part],
        codec.shapes(local_of(parameter).shape)[part],
    )
    return Rows(outline(parameter, whole, mine, dtype), parts, write, optimizer.resident)


def _master(optimizer: OffloadedOptimizer, parameter: nn.Parameter, segments: Segments) -> Rows:
    def home() -> torch.Tensor:
        return local_of(parameter) if optimizer.shelf is None else optimizer.shelf.view(parameter)

    def parts() -> Iterator[torch.Tensor]:
        if not optimizer.split:
            yield home()
            return
        for piece, segment in segments:
            high, low = home()[segment.start : segment.stop], at(piece.blob(), segment.low)
            if optimizer.resident is None:
                high, low = high.cpu(), low.cpu()
            rows = max(1, JOINED // columns(high.shape))
            for start in range(0, len(high), rows):
                yield join(high[start : start + rows], low[start : start + rows])

    def write(start: int, rows: torch.Tensor) -> None:
        if not optimizer.split:
            home()[start : start + len(rows)].copy_(rows)
            return
        for piece, segment, target, source in overlaps(segments, start, rows):
            part = rows[source].float().clone()
            high, low = (
                torch.empty_like(part, dtype=torch.bfloat16),
                torch.empty_like(part, dtype=torch.int16),
            )
            split_(part, high, low)
            home()[segment.start : segment.stop][target].copy_(high)
            at(piece.blob(), segment.low)[target].copy_(low)

    mine = tuple(local_of(parameter).shape)
    whole = outline(parameter, tuple(parameter.shape), mine, torch.float32)
    return Rows(whole, parts, write, optimizer.resident)
