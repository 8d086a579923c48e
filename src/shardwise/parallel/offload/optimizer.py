"""The optimizer's states off the device: ZeRO-Offload and ZeRO-Infinity's optimizer, whole or in part.

[Note: where the step runs] The states live in host memory or in files, but the update is computed on the device: pieces
of state stream in, are updated, and stream out (paging.py). An H200's bus moves 50 GB/s in each direction at once, 16
host cores update 4 G parameters/s; AdamW's 10 bytes per parameter and direction make the stream 1.25 times as fast as
the cores, 8-bit moments 3 times, it leaves the host's cores and memory bus to others, and the arithmetic is the same as
without offload. On a CPU device, host memory is used in place.

[Note: overlap] An update may begin when its gradient is known, and must end before its unit's next forward. With
clipping the gradient is known when the norm is, after backward: pieces are then streamed in the order of the forward,
each unit's forward waits for its own pieces only, and the rest goes on beside it. Without clipping (or loss scale) a
piece may start when its gradients are reduced, during backward (`eager`). Of those only the last in the order of the
forward do, a share of EAGER, whose streaming backward can hide; the first ones would queue up behind them just when the
next forward waits for them, so they are left to the step, in the forward's order. Where gradients must be freed during
backward (train.optimizer_in_backward), all are eager.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
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
from shardwise.parallel.offload.gradients import GradientOffloadBuffer, Take, take_gradients
from shardwise.parallel.offload.launches import by_launch
from shardwise.parallel.offload.paging import Page, Pager, Region
from shardwise.parallel.offload.parameters import ParameterOffload
from shardwise.parallel.offload.pieces import OffloadPiece, ShardSegment, at, cut, lay_out
from shardwise.parallel.offload.pinned_memory import aligned, host_buffers
from shardwise.parallel.zero.stages import ShardedModel

PIECE = {"cuda": 32 << 20, "cpu": 2 << 20}  # elements updated at once


class OffloadedOptimizer(torch.optim.Optimizer):
    """Any elementwise rule over sharded parameters, its states on the device, on the host, or on disk.

    `order` lists the parameters by unit in the order of the forward; the first `1 - ratio` of the elements keep
    their states on the device, because a forward waits for the first pieces longest. `split` keeps masters in two
    halves (master.py): the parameters are bf16, the low halves are state. `shelf` holds the parameters if they are
    off the device too; their gradients then are as well.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        order: Mapping[str, nn.Parameter],
        rule: UpdateRule,
        kind: Kind,
        defaults: dict[str, Any],
        device: torch.device,
        ratio: float = 1.0,
        disk: DiskFolder | None = None,
        split: bool = False,
        shelf: ParameterOffload | None = None,
        shelf_disk: DiskFolder | None = None,
        piece: int | None = None,
    ) -> None:
        super().__init__(groups, defaults)
        self.rule, self.device, self.split, self.shelf, self.steps = rule, device, split, shelf, 0
        self.names = {p: n for n, p in order.items()}
        self.pieces = cut(
            order, self.param_groups, rule.states, kind, piece or PIECE[effective_device(device)]
        )
        self.of: dict[nn.Parameter, list[OffloadPiece]] = {}
        for made in self.pieces:
            for parameter in dict.fromkeys(s.parameter for s in made.segments):
                self.of.setdefault(parameter, []).append(made)
        self.resident = (
            device if ratio == 0 and shelf is None else None
        )  # where everything lies, if nothing is away
        self._house(ratio, disk)
        self._shelved = GradientOffloadBuffer(self.pieces, device, shelf_disk) if (
            shelf is not None and (shelf_disk is not None or effective_device(device) == "cuda")) else None  # fmt: skip
        if shelf is not None:
            for made in self.pieces:
                self._add_shelved_regions(made, shelf)
        self.pager = Pager(device, [p.page for p in self.pieces])
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._order = list(self.pieces)  # in which pieces were last updated
        self._left: dict[OffloadPiece, int] | None = (
            None  # gradients that pieces still wait for, during an eager step
        )
        self._known: Take | None = None

    def _house(self, ratio: float, disk: DiskFolder | None) -> None:
        """Gives every piece's blob its home."""
        sizes = [lay_out(p, self.rule.states, self.split) for p in self.pieces]
        total, kept, resident = sum(p.elements for p in self.pieces), 0, 0
        for piece in self.pieces:  # the first ones stay
            if kept + piece.elements > total * (1 - ratio) + 0.5:
                break
            kept, resident = kept + piece.elements, resident + 1
        for piece, size in zip(self.pieces[:resident], sizes, strict=False):
            piece.page.regions.append(
                Region(size, torch.zeros(size, dtype=torch.uint8, device=self.device))
            )
        away, lengths = self.pieces[resident:], sizes[resident:]
        if disk is None:
            for piece, buffer in zip(away, host_buffers(lengths, self.device), strict=True):
                piece.page.regions.append(Region(buffer.numel(), buffer))
            return
        file, here = disk.create("optimizer.bin", sum(aligned(s) for s in lengths)), 0
        for piece, size in zip(away, lengths, strict=True):
            piece.page.regions.append(Region(size, file=file, offset=here))
            here += aligned(size)

    def _add_shelved_regions(self, piece: OffloadPiece, shelf: ParameterOffload) -> None:
        """After the blob: for each segment its rows of the parameter and, if they are off the device, its gradient."""
        for segment in piece.segments:
            piece.page.regions.append(shelf.region(segment.parameter, segment.start, segment.stop))
            shelf.changed_by(segment.parameter, piece.page)
            if self._shelved is not None:
                piece.page.regions.append(self._shelved.region(segment))

    @property
    def held(self) -> dict[str, int]:
        """Bytes of host memory and of device memory that the states and the buffers for paging take."""
        result = dict(self.pager.held)
        for piece in self.pieces:
            buffer = piece.page.regions[0].buffer
            if buffer is not None:
                result[
                    "host" if is_host(buffer) or effective_device(buffer) == "cpu" else "device"
                ] += buffer.numel()
        result["host"] += (self.shelf.held if self.shelf else 0) + (
            self._shelved.held if self._shelved else 0
        )
        return result

    def buffers(self) -> list[torch.Tensor]:
        """What of the states, and for moving them, lies on the device at all times."""
        resident = [r.buffer for p in self.pieces for r in p.page.regions if r.buffer is not None]
        return [*self.pager.rings(), *(b for b in resident if not is_host(b))]

    # --- gradients

    def attach(
        self, sharded: ShardedModel, known: Take | None, accumulates: bool, eager: float
    ) -> None:
        """Takes gradients as they are reduced; with `known` (told of each complete one) it also updates at once.

        `eager` is the share of the elements for which it does, the last in the order of the forward.
        """
        self._sharded, self._known = sharded, known
        left = eager * sum(p.elements for p in self.pieces) if known is not None else 0.0
        for piece in reversed(self.pieces):
            piece.eager, left = left > 0, left - piece.elements
        parameters = list(sharded.parameters.values())
        # What one rank computes in one micro-batch is in bf16 already: nothing is summed, so nothing is lost.
        exact = self.split and (accumulates or sharded.mesh.size() > 1)
        if exact and not any(
            isinstance(p, DTensor) for p in parameters
        ):  # no FSDP between: each micro-batch's own
            take_gradients(
                [], parameters, lambda p, gradient: self._take(p, gradient.float()), False
            )
        elif exact or self._shelved is not None:
            take_gradients(sharded.units, parameters, self._take, exact)
        elif known is not None:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._at_hand)
        if self.device.type == "cuda":
            self._wait_before_use(sharded.units)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of this step so far: what was handed over, or what lies at the parameter."""
        return self._gradients.get(parameter, parameter.grad)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of this step that are on the device, in the model's order (norms add up in it)."""
        found = [self.gradient(p) for p in self._sharded.parameters.values()]
        return [g for g in found if g is not None]

    def norm(self) -> torch.Tensor:
        """The norm of the gradients, wherever they are, the same on every rank."""
        if self._shelved is not None:
            return self._shelved.norm(self._sharded)
        return self._sharded.norm(self.gradients())

    def _take(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        if self._shelved is not None:
            final = self._shelved.add(parameter, local_of(gradient), self._sharded.last)
            if self._known is not None and self._sharded.last:
                self._complete(parameter, final)
            return
        held = self._gradients.get(parameter)
        if held is None:
            self._gradients[parameter] = held = gradient
        else:
            local_of(held).add_(local_of(gradient))
        if self._known is not None and self._sharded.last:
            self._complete(parameter, held)

    def _at_hand(self, parameter: torch.Tensor) -> None:
        if self._sharded.last:
            assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
            self._complete(parameter, parameter.grad)

    @torch.no_grad()
    def _complete(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Eagerly: this gradient is the step's; pieces that lacked only this are updated."""
        assert self._known is not None
        self._known(parameter, gradient)
        if self._left is None:
            self.steps += 1
            self._left = {
                piece: len({s.parameter for s in piece.segments}) for piece in self.pieces
            }
            if self._shelved is None:  # a gradient that is not known yet cannot be read ahead
                self.pager.expect([p.page for p in self._order])
            self._order = []
        for piece in self.of.get(parameter, []):
            self._left[piece] -= 1
            if piece.eager and not self._left[piece]:
                self._begin()
                self._update(piece, None)
                self._order.append(piece)
                del self._left[piece]
                self._forget(piece)

    def _forget(self, updated: OffloadPiece) -> None:
        """Frees gradients that no piece waits for any more."""
        assert self._left is not None
        for parameter in {s.parameter for s in updated.segments}:
            if not any(p in self._left for p in self.of[parameter]):
                self._gradients.pop(parameter, None)
                parameter.grad = None

    # --- stepping

    @torch.no_grad()
    def step(self, closure: Any = None, scale: torch.Tensor | None = None) -> None:  # type: ignore[override]
        """Updates what is not yet; `scale` (of one element, on the device) multiplies the gradients first."""
        if scale is not None and scale.is_cuda:
            scale.record_stream(
                self.pager.work
            )  # the caller lets go of it while updates are still queued
        self._begin()
        if self._left is None:
            self.steps += 1
            order = self.pieces
            self.pager.expect([p.page for p in order])
        else:
            order = [p for p in self.pieces if p in self._left]
            self._order += order
            if self._shelved is not None:
                self.pager.expect([p.page for p in order])
        for piece in order:
            self._update(piece, scale)
        self._gradients.clear()
        self._left = None
        if self._shelved is not None:
            self._shelved.clear()

    def _begin(self) -> None:
        if self._shelved is not None:
            self._shelved.settle()
        self.pager.begin(self._shelved.stream if self._shelved is not None else None)

    def _update(self, piece: OffloadPiece, scale: torch.Tensor | None) -> None:
        with self.pager.opened(piece.page) as regions:
            blob, rest = regions[0], iter(regions[1:])
            fused = self.shelf is None and self.split and self.rule is RULES["adamw"]
            for segment in self._update_together(piece, blob, scale) if fused else piece.segments:
                high = (
                    self._rows_of(segment)
                    if self.shelf is None
                    else _as(next(rest), segment, segment.parameter.dtype)
                )
                if self._shelved is not None:
                    known = segment.parameter in self._shelved.seen
                    gradient = _as(next(rest), segment, torch.float32)
                    self._update_segment(segment, blob, high, gradient, scale) if known else None
                elif (whole := self.gradient(segment.parameter)) is not None:
                    if whole.is_cuda:
                        local_of(whole).record_stream(self.pager.work)
                    rows = local_of(whole)[segment.start : segment.stop]
                    self._update_segment(segment, blob, high, rows, scale)

    def _update_together(
        self, piece: OffloadPiece, blob: torch.Tensor, scale: torch.Tensor | None
    ) -> list[ShardSegment]:
        """Updates what can be in one launch; returns the others."""
        together, left = by_launch(piece, self.gradient, blob)
        for launch in together:
            for rows in launch.gradients:
                rows.record_stream(self.pager.work)
            highs = [self._rows_of(segment) for segment in launch.segments]
            split_adamw_together(
                highs, blob, launch.layout, launch.gradients, scale, self._hyper(launch.segments[0])
            )
        return left

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
        codecs, hyper = segment.codecs, self._hyper(segment)
        stored = {
            s: {k: at(blob, place) for k, place in parts.items()}
            for s, parts in segment.parts.items()
        }
        low = at(blob, segment.low) if self.split else None
        seeds = [mix(self.steps, zlib.crc32(segment.name.encode()), i) for i in range(len(stored))]
        if self.rule is RULES["adamw"]:
            mean, square = stored["exp_avg"], stored["exp_avg_sq"]
            if low is not None and codecs["exp_avg"] is FP32:
                split_adamw(high, low, gradient, mean[""], square[""], scale, hyper)
                return
            if high.is_cuda and isinstance(codecs["exp_avg"], Blockwise):
                from shardwise.optim.kernels import coded_adamw as fused  # imports Triton

                first = StoredState(codecs["exp_avg"], mean, seeds[0])
                second = StoredState(codecs["exp_avg_sq"], square, seeds[1])
                weights = high.view(len(high), -1)
                rows = gradient.view(weights.shape)
                fused.adamw(weights, rows, first, second, segment.offset, hyper, low, scale)
                return
        gradient = gradient.float() if scale is None else gradient.float() * scale
        master = high if low is None else join(high, low)
        states = {s: [codecs[s].decode(parts, segment.shape)] for s, parts in stored.items()}
        self.rule([master], [gradient], states, hyper)
        for seed, (state, parts) in zip(seeds, stored.items(), strict=True):
            codecs[state].encode(states[state][0], parts, seed, segment.offset)
        if low is not None:
            split_(master, high, low)

    def finish(self) -> None:
        """Returns when the parameters and all states are up to date where they live."""
        self.pager.finish()

    def _wait_before_use(self, units: Sequence[FSDPModule]) -> None:
        """Lets the forward of each unit wait for the updates of its own parameters, and no others."""
        owner: dict[nn.Parameter, FSDPModule] = {}
        for unit in units:  # inner ones come later
            owner |= dict.fromkeys(_module(unit).parameters(), unit)
        # By FSDP's state and not by module: blocks that are joined are gathered at the first one's forward.
        pages: dict[Any, list[Page]] = {}
        for parameter, unit in owner.items():
            pages.setdefault(fsdp_state(unit), []).extend(
                p.page for p in self.of.get(parameter, [])
            )

        def wait(module: nn.Module, args: Any) -> None:
            assert isinstance(module, FSDPModule)
            state = fsdp_state(module)
            streams = [torch.cuda.current_stream(self.device), *gather_streams(state)]
            for page in pages[state]:
                for stream in streams if page.done is not None else []:
                    stream.wait_event(page.done)

        for unit in units:
            if fsdp_state(unit) in pages:
                _module(unit).register_forward_pre_hook(wait, prepend=True)


def _module(unit: FSDPModule) -> nn.Module:
    assert isinstance(unit, nn.Module)
    return unit


def _as(region: torch.Tensor, segment: ShardSegment, dtype: torch.dtype) -> torch.Tensor:
    return region.view(dtype).view(segment.shape)
