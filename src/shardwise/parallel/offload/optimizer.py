"""Optimizer states off the device: ZeRO-Offload and ZeRO-Infinity's optimizer, fully or in part.

[Note: where the step runs] The states are in host memory or in files, but the update is computed on
the device: pieces of state stream in, are updated, and stream out (paging.py). An H200's bus moves
50 GB/s in each direction at once, 16 host cores update 4 G parameters/s. With AdamW's 10 bytes per
parameter and direction the stream is 1.25 times as fast as the cores, with 8-bit moments 3 times;
it leaves the host's cores and memory bus to others, and the arithmetic is the same as without
offload. On a CPU device, host memory is used in place.

[Note: overlap] An update may begin when its gradient is complete, and must end before its unit's
next forward. With clipping the gradient is complete when the norm is, after backward: pieces are
then streamed in forward order, each unit's forward waits for its own pieces only, and the rest
overlaps with it. Without clipping (or loss scale) a piece may start when its gradients are reduced,
during backward (`eager`). Only the last pieces in forward order do, a share of EAGER, whose
streaming backward can hide; the first ones would queue up behind them just when the next forward
waits for them, so they are left to the step, in forward order. Where gradients must be freed during
backward (train.optimizer_in_backward), all are eager.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.core.compat.torch_private import fsdp_state, gather_streams
from shardwise.core.effective_device import effective_device, is_host
from shardwise.optim.codecs import FP32, Blockwise, Kind, StoredState, mix
from shardwise.optim.kernels.split_adamw import split_adamw, split_adamw_together
from shardwise.optim.rules import RULES, Hyper, UpdateRule
from shardwise.optim.shards import local_of
from shardwise.optim.split_master import join, split_
from shardwise.parallel.offload.disk import DiskFolder
from shardwise.parallel.offload.gradients import (
    GradientHook,
    GradientOffloadBuffer,
    take_gradients,
)
from shardwise.parallel.offload.launches import group_launches
from shardwise.parallel.offload.paging import Page, Pager, Region
from shardwise.parallel.offload.parameters import ParameterOffload
from shardwise.parallel.offload.pieces import (
    OffloadPiece,
    ShardSegment,
    cut_pieces,
    lay_out,
    view_at,
)
from shardwise.parallel.offload.pinned_memory import aligned, host_buffers
from shardwise.parallel.zero.stages import ShardedModel

PIECE = {"cuda": 32 << 20, "cpu": 2 << 20}  # elements updated at once


@dataclass(frozen=True)
class StatePlacement:
    """Where optimizer states are: a share `ratio` on the host or on `disk`, the rest on `device`.

    `split` stores masters in two halves (split_master.py): the parameters are bf16, the low halves
    are state. `parameters` holds the parameters if they are offloaded too; their gradients then are
    as well, on `parameter_disk` if given. `piece`: elements updated at once.
    """

    device: torch.device
    ratio: float = 1.0
    disk: DiskFolder | None = None
    split: bool = False
    parameters: ParameterOffload | None = None
    parameter_disk: DiskFolder | None = None
    piece: int | None = None


class OffloadedOptimizer(torch.optim.Optimizer):
    """Any elementwise rule over sharded parameters, its states on the device, the host, or disk.

    `order` lists the parameters by unit in forward order; the first `1 - ratio` of the elements
    have their states on the device, because a forward waits for the first pieces longest.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        order: Mapping[str, nn.Parameter],
        rule: UpdateRule,
        kind: Kind,
        defaults: dict[str, Any],
        placement: StatePlacement,
    ) -> None:
        super().__init__(groups, defaults)
        device = placement.device
        self.rule = rule
        self.device = device
        self.split = placement.split
        self.parameter_offload = placement.parameters
        self.steps = 0
        self.names = {p: n for n, p in order.items()}
        limit = placement.piece or PIECE[effective_device(device)]
        self.pieces = cut_pieces(order, self.param_groups, rule.states, kind, limit)
        self.pieces_of: dict[nn.Parameter, list[OffloadPiece]] = {}
        for piece in self.pieces:
            for parameter in dict.fromkeys(s.parameter for s in piece.segments):
                self.pieces_of.setdefault(parameter, []).append(piece)
        # The device of all states, if nothing is offloaded.
        nothing_offloaded = placement.ratio == 0 and self.parameter_offload is None
        self.resident = device if nothing_offloaded else None
        self._place_states(placement.ratio, placement.disk)
        self._gradient_buffer: GradientOffloadBuffer | None = None
        if self.parameter_offload is not None:
            disk = placement.parameter_disk
            if disk is not None or effective_device(device) == "cuda":
                self._gradient_buffer = GradientOffloadBuffer(self.pieces, device, disk)
            for piece in self.pieces:
                self._add_parameter_regions(piece, self.parameter_offload)
        self.pager = Pager(device, [p.page for p in self.pieces])
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._completed: set[nn.Parameter] = set()
        self._order = list(self.pieces)  # in which pieces were last updated
        # During an eager step, the number of gradients that each piece still waits for.
        self._pending: dict[OffloadPiece, int] | None = None
        self._on_complete: GradientHook | None = None

    def _place_states(self, ratio: float, disk: DiskFolder | None) -> None:
        """Allocates every piece's blob on the device, on the host, or in a file."""
        sizes = [lay_out(p, self.rule.states, self.split) for p in self.pieces]
        limit = sum(p.elements for p in self.pieces) * (1 - ratio) + 0.5
        elements = 0
        resident = 0  # pieces on the device: the first ones
        for piece in self.pieces:
            elements += piece.elements
            if elements > limit:
                break
            resident += 1
        for piece, size in zip(self.pieces[:resident], sizes, strict=False):
            buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            piece.page.regions.append(Region(size, buffer))
        offloaded = self.pieces[resident:]
        sizes = sizes[resident:]
        if disk is None:
            for piece, buffer in zip(offloaded, host_buffers(sizes, self.device), strict=True):
                piece.page.regions.append(Region(buffer.numel(), buffer))
            return
        file = disk.create("optimizer.bin", sum(map(aligned, sizes)))
        offset = 0
        for piece, size in zip(offloaded, sizes, strict=True):
            piece.page.regions.append(Region(size, file=file, offset=offset))
            offset += aligned(size)

    def _add_parameter_regions(self, piece: OffloadPiece, offload: ParameterOffload) -> None:
        """After the blob: each segment's rows of the parameter and, if offloaded, its gradient."""
        for segment in piece.segments:
            rows = offload.region(segment.parameter, segment.start, segment.stop)
            piece.page.regions.append(rows)
            offload.changed_by(segment.parameter, piece.page)
            if self._gradient_buffer is not None:
                piece.page.regions.append(self._gradient_buffer.region(segment))

    @property
    def held(self) -> dict[str, int]:
        """Bytes of host and device memory of the states and the buffers for paging."""
        result = dict(self.pager.held)
        for piece in self.pieces:
            buffer = piece.page.regions[0].buffer
            if buffer is not None:
                on_host = is_host(buffer) or effective_device(buffer) == "cpu"
                result["host" if on_host else "device"] += buffer.numel()
        if self.parameter_offload is not None:
            result["host"] += self.parameter_offload.held
        if self._gradient_buffer is not None:
            result["host"] += self._gradient_buffer.held
        return result

    def buffers(self) -> list[torch.Tensor]:
        """The states, and the buffers for moving them, that are on the device at all times."""
        buffers = self.pager.rings()
        for piece in self.pieces:
            for region in piece.page.regions:
                if region.buffer is not None and not is_host(region.buffer):
                    buffers.append(region.buffer)
        return buffers

    # --- gradients

    def attach(
        self,
        sharded: ShardedModel,
        on_complete: GradientHook | None,
        accumulates: bool,
        eager: float,
    ) -> None:
        """Takes gradients as they are reduced.

        With `on_complete`, called for each complete gradient, updates start during backward, for a
        share `eager` of the elements, the last in forward order.
        """
        self._sharded = sharded
        self._on_complete = on_complete
        remaining = 0.0
        if on_complete is not None:
            remaining = eager * sum(p.elements for p in self.pieces)
        for piece in reversed(self.pieces):
            piece.eager = remaining > 0
            remaining -= piece.elements
        parameters = list(sharded.parameters.values())
        # One rank computes one micro-batch in bf16 anyway: nothing is summed, so nothing is lost.
        alone = sharded.mesh.size() == 1 and sharded.replication_factors is None
        exact = self.split and (accumulates or not alone)
        sharded.gradient_of = self._gradient_to_sum
        if exact and not any(isinstance(p, DTensor) for p in parameters):
            # Without FSDP, the gradient of each micro-batch.
            take_gradients([], parameters, lambda p, grad: self._take(p, grad.float()), False)
        elif exact or self._gradient_buffer is not None:
            take_gradients(sharded.units, parameters, self._take, exact)
        elif on_complete is not None:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._accumulated)
        if self.device.type == "cuda":
            self._wait_before_use(sharded.units)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of this step so far: the one taken, or the parameter's own."""
        return self._gradients.get(parameter, parameter.grad)

    def gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """The gradients of this step on the device, in the model's order (that of norms' sums)."""
        result: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self._sharded.parameters.values():
            gradient = self.gradient(parameter)
            if gradient is not None:
                result[parameter] = gradient
        return result

    def norm(self) -> torch.Tensor:
        """The norm of the gradients, on the device or offloaded, the same on every rank."""
        self._complete_rest()
        if self._gradient_buffer is not None:
            return self._sharded.norm_of_squares(self._gradient_buffer.squares())
        return self._sharded.norm_by_parameter(self.gradients())

    def _gradient_to_sum(self, parameter: nn.Parameter) -> torch.Tensor:
        """The gradient of a parameter that is added up over pipeline stages, in place."""
        gradient = self.gradient(parameter)
        if gradient is None:
            dtype = torch.float32 if self.split else parameter.dtype
            gradient = torch.zeros_like(parameter, dtype=dtype)
            self._gradients[parameter] = gradient
        return gradient

    @torch.no_grad()
    def _complete_rest(self) -> None:
        """Completes the gradients that no backward of the step was the last one for.

        Those are of parameters that several pipeline chunks use, or that the last backward did not.
        """
        buffer = self._gradient_buffer
        if buffer is None and self._on_complete is None:
            return
        for parameter in self._sharded.parameters.values():
            if parameter in self._completed:
                continue
            if buffer is None:
                total = self.gradient(parameter)
            else:
                gradient = self._gradients.pop(parameter, None)
                if gradient is None and parameter in buffer.seen:
                    gradient = torch.zeros_like(local_of(parameter), dtype=torch.float32)
                total = gradient
                if gradient is not None:
                    total = buffer.add(parameter, local_of(gradient), last=True)
            if total is not None:
                self._complete(parameter, total)

    def _take(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        late = parameter in self._sharded.complete_late
        last = self._sharded.last and not late
        if self._gradient_buffer is not None and not late:
            total = self._gradient_buffer.add(parameter, local_of(gradient), last)
        else:
            if parameter in self._gradients:
                local_of(self._gradients[parameter]).add_(local_of(gradient))
            else:
                self._gradients[parameter] = gradient
            total = self._gradients[parameter]
        if last:
            self._complete(parameter, total)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        if self._sharded.last and parameter not in self._sharded.complete_late:
            self._complete(parameter, parameter.grad)

    @torch.no_grad()
    def _complete(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """In an eager step, updates the pieces that waited for this gradient only."""
        self._completed.add(parameter)
        if self._on_complete is None:
            return
        self._on_complete(parameter, gradient)
        if self._pending is None:
            self.steps += 1
            self._pending = {}
            for piece in self.pieces:
                self._pending[piece] = len({s.parameter for s in piece.segments})
            if self._gradient_buffer is None:  # an incomplete gradient cannot be read ahead
                self.pager.expect([p.page for p in self._order])
            self._order = []
        for piece in self.pieces_of.get(parameter, []):
            self._pending[piece] -= 1
            if piece.eager and not self._pending[piece]:
                self._begin()
                self._update(piece, None)
                self._order.append(piece)
                del self._pending[piece]
                self._free_gradients(piece)

    def _free_gradients(self, updated: OffloadPiece) -> None:
        """Frees gradients that no piece waits for any more."""
        assert self._pending is not None
        for parameter in {s.parameter for s in updated.segments}:
            if self._pending.keys().isdisjoint(self.pieces_of[parameter]):
                self._gradients.pop(parameter, None)
                parameter.grad = None

    # --- stepping

    @torch.no_grad()
    def step(self, closure: Any = None, scale: torch.Tensor | None = None) -> None:  # type: ignore[override]
        """Updates the pieces that were not updated in backward.

        `scale` (one element, on the device) multiplies the gradients first.
        """
        if scale is not None and scale.is_cuda:
            # The caller frees it while updates are still queued.
            scale.record_stream(self.pager.work)
        self._complete_rest()
        self._begin()
        if self._pending is None:
            self.steps += 1
            order = self.pieces
            self.pager.expect([p.page for p in order])
        else:
            order = [p for p in self.pieces if p in self._pending]
            self._order += order
            if self._gradient_buffer is not None:
                self.pager.expect([p.page for p in order])
        for piece in order:
            self._update(piece, scale)
        self._gradients.clear()
        self._completed.clear()
        self._pending = None
        if self._gradient_buffer is not None:
            self._gradient_buffer.clear()

    def _begin(self) -> None:
        if self._gradient_buffer is None:
            self.pager.begin()
        else:
            self._gradient_buffer.settle()
            self.pager.begin(self._gradient_buffer.stream)

    def _update(self, piece: OffloadPiece, scale: torch.Tensor | None) -> None:
        offload = self.parameter_offload
        with self.pager.opened(piece.page) as regions:
            blob = regions[0]
            segments = piece.segments
            if offload is None and self.split and self.rule is RULES["adamw"]:
                segments = self._update_together(piece, blob, scale)
            rest = iter(regions[1:])
            for segment in segments:
                if offload is None:
                    high = self._rows_of(segment)
                else:
                    high = _rows_in(next(rest), segment, segment.parameter.dtype)
                gradient = self._gradient_rows(segment, rest)
                if gradient is not None:
                    self._update_segment(segment, blob, high, gradient, scale)

    def _gradient_rows(
        self, segment: ShardSegment, regions: Iterator[torch.Tensor]
    ) -> torch.Tensor | None:
        """A segment's gradient; from the page's next region if gradients are offloaded."""
        if self._gradient_buffer is not None:
            rows = _rows_in(next(regions), segment, torch.float32)
            return rows if segment.parameter in self._gradient_buffer.seen else None
        gradient = self.gradient(segment.parameter)
        if gradient is None:
            return None
        local = local_of(gradient)
        if gradient.is_cuda:
            local.record_stream(self.pager.work)
        return local[segment.start : segment.stop]

    def _update_together(
        self, piece: OffloadPiece, blob: torch.Tensor, scale: torch.Tensor | None
    ) -> list[ShardSegment]:
        """Updates the segments that fit into joint launches; returns the others."""
        launches, others = group_launches(piece, self.gradient, blob)
        for launch in launches:
            for rows in launch.gradients:
                rows.record_stream(self.pager.work)
            highs = [self._rows_of(segment) for segment in launch.segments]
            hyper = self._hyper(launch.segments[0])
            split_adamw_together(highs, blob, launch.layout, launch.gradients, scale, hyper)
        return others

    def _hyper(self, segment: ShardSegment) -> Hyper:
        group = segment.group
        return Hyper(group["lr"], group["betas"], group["eps"], group["weight_decay"], self.steps)

    def _rows_of(self, segment: ShardSegment) -> torch.Tensor:
        return local_of(segment.parameter)[segment.start : segment.stop]

    def _update_segment(
        self,
        segment: ShardSegment,
        blob: torch.Tensor,
        high: torch.Tensor,
        gradient: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> None:
        codecs = segment.codecs
        hyper = self._hyper(segment)
        stored: dict[str, dict[str, torch.Tensor]] = {}
        seeds: list[int] = []
        for state, places in segment.parts.items():
            stored[state] = {part: view_at(blob, place) for part, place in places.items()}
            seeds.append(mix(self.steps, zlib.crc32(segment.name.encode()), len(seeds)))
        low = view_at(blob, segment.low) if self.split else None
        if self.rule is RULES["adamw"]:
            mean = stored["exp_avg"]
            square = stored["exp_avg_sq"]
            if low is not None and codecs["exp_avg"] is FP32:
                split_adamw(high, low, gradient, mean[""], square[""], scale, hyper)
                return
            if high.is_cuda and isinstance(codecs["exp_avg"], Blockwise):
                from shardwise.optim.kernels import coded_adamw as fused  # imports Triton

                first = StoredState(codecs["exp_avg"], mean, seeds[0])
                second = StoredState(codecs["exp_avg_sq"], square, seeds[1])
                weights = high.view(len(high), -1)
                rows = gradient.view(weights.shape)
                offset = segment.offset
                stride = segment.stride
                fused.adamw(weights, rows, first, second, offset, hyper, low, scale, stride)
                return
        gradient = gradient.float()
        if scale is not None:
            gradient = gradient * scale
        master = high if low is None else join(high, low)
        states = {s: [codecs[s].decode(parts, segment.shape)] for s, parts in stored.items()}
        self.rule([master], [gradient], states, hyper)
        for seed, (state, parts) in zip(seeds, stored.items(), strict=True):
            codecs[state].encode(states[state][0], parts, seed, segment.offset, segment.stride)
        if low is not None:
            split_(master, high, low)

    def finish(self) -> None:
        """Returns when the parameters and all states are up to date in their homes."""
        self.pager.finish()

    def _wait_before_use(self, units: Sequence[FSDPModule]) -> None:
        """Makes the forward of each unit wait for the updates of its own parameters only."""
        owner: dict[nn.Parameter, FSDPModule] = {}
        for unit in units:  # inner ones come later
            owner |= dict.fromkeys(_module(unit).parameters(), unit)
        # By FSDP's state, not by module: joined blocks are gathered at the first one's forward.
        pages: dict[Any, list[Page]] = {}
        for parameter, unit in owner.items():
            pages_of_unit = pages.setdefault(fsdp_state(unit), [])
            pages_of_unit += [p.page for p in self.pieces_of.get(parameter, [])]

        def wait(module: nn.Module, args: Any) -> None:
            assert isinstance(module, FSDPModule)
            state = fsdp_state(module)
            streams = [torch.cuda.current_stream(self.device), *gather_streams(state)]
            for page in pages[state]:
                if page.done is not None:
                    for stream in streams:
                        stream.wait_event(page.done)

        for unit in units:
            if fsdp_state(unit) in pages:
                _module(unit).register_forward_pre_hook(wait, prepend=True)


def _module(unit: FSDPModule) -> nn.Module:
    assert isinstance(unit, nn.Module)
    return unit


def _rows_in(region: torch.Tensor, segment: ShardSegment, dtype: torch.dtype) -> torch.Tensor:
    return region.view(dtype).view(segment.shape)
