"""The optimizer's states off the device: ZeRO-Offload and ZeRO-Infinity's optimizer, whole or in part.

[Note: where the step runs] The states live in host memory or in files, but the update is computed on the device: pieces
of state stream in, are updated, and stream out (paging.py). An H200's bus moves 51 GiB/s in each direction at once,
16 host cores update 4 G parameters/s; AdamW's 10 bytes per parameter and direction make the stream 1.4 times as fast
as the cores, 8-bit moments 3.4 times, it leaves the host's cores and memory bus to others, and the arithmetic is the
very same as without offload, to the bit. On a CPU device, host memory is used in place.

[Note: overlap] An update may begin when its gradient is known, and must end before its unit's next forward. With clipping
the gradient is known when the norm is, after backward: pieces are then streamed in the order of the forward, each unit's
forward waits for its own pieces only, and the rest goes on beside it. Without clipping (or loss scale) each piece
starts when its gradients are reduced, during backward, and its gradients are freed (`eager`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.checkpoint.rows import Rows, outline
from shardwise.config.schema import Run
from shardwise.optim.adamw import decay_groups
from shardwise.optim.codecs import Codec, Kind, codec_of, columns, mix, part_name
from shardwise.optim.rules import Hyper, Rule, rule_of
from shardwise.zero.disk import DiskFolder
from shardwise.zero.gradients import Take, take_reduced_gradients
from shardwise.zero.host import aligned, host_buffers
from shardwise.zero.master import join, split_
from shardwise.zero.paging import Page, Pager, Region
from shardwise.zero.stages import ShardedModel

PIECE = {"cuda": 16 << 20, "cpu": 2 << 20}  # elements updated at once


Place = tuple[int, tuple[int, ...], torch.dtype]  # offset in a blob, shape, type


@dataclass
class Segment:
    """Rows of one parameter's shard, and where their states lie in the piece's blob."""

    name: str
    parameter: nn.Parameter
    group: dict[str, Any]
    first: int  # row of the whole parameter at which this rank's shard begins
    start: int
    stop: int
    codecs: dict[str, Codec]
    low: int | None = None  # offset of the master's low half
    parts: dict[str, dict[str, Place]] = field(default_factory=dict)

    @property
    def high(self) -> torch.Tensor:
        """The rows of the parameter itself."""
        return local(self.parameter)[self.start : self.stop]


@dataclass(eq=False)
class Piece:
    """Segments that are updated together: one blob of state."""

    segments: list[Segment]
    page: Page

    @property
    def elements(self) -> int:
        return sum(s.high.numel() for s in self.segments)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, without a detour through autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def first_row(tensor: torch.Tensor) -> int:
    """The row of the whole tensor at which this rank's part begins."""
    if not isinstance(tensor, DTensor):
        return 0
    return int(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1][0])


class OffloadedOptimizer(torch.optim.Optimizer):
    """Any elementwise rule over sharded parameters, its states on the device, on the host, or on disk.

    `order` lists the parameters by unit in the order of the forward; the first `1 - ratio` of the elements keep
    their states on the device, because a forward waits for the first pieces longest. `split` keeps masters in two
    halves (master.py): the parameters are bf16, the low halves are state.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        order: Mapping[str, nn.Parameter],
        rule: Rule,
        kind: Kind,
        defaults: dict[str, Any],
        device: torch.device,
        ratio: float,
        disk: DiskFolder | None,
        split: bool,
        piece: int | None = None,
    ) -> None:
        super().__init__(groups, defaults)
        self.rule, self.device, self.split, self.steps = rule, device, split, 0
        self._names = {p: n for n, p in order.items()}
        self.pieces = self._cut(order, kind, piece or PIECE[device.type])
        self._house(ratio, disk)
        self.pager = Pager(device, [p.page for p in self.pieces])
        self._of = self._pieces_of()
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._order = list(self.pieces)  # in which pieces were last updated
        self._left: dict[Piece, int] | None = None  # gradients that pieces still wait for, during an eager step
        self._known: Take | None = None

    # --- making

    def _cut(self, order: Mapping[str, nn.Parameter], kind: Kind, limit: int) -> list[Piece]:
        group_of = {p: g for g in self.param_groups for p in g["params"]}
        pieces: list[Piece] = []
        room = 0
        for name, parameter in order.items():
            if parameter not in group_of:
                continue
            codecs = {state: codec_of(kind, state, parameter.shape) for state in self.rule.states}
            rows, first = local(parameter).shape[0], first_row(parameter)
            # Whole multiples of 64 rows where a parameter is divided, so that ranges stay aligned in every type.
            step = max(64, limit // columns(parameter.shape) // 64 * 64)
            for start in range(0, rows, step):
                segment = Segment(name, parameter, group_of[parameter], first, start, min(start + step, rows), codecs)
                if room < segment.high.numel() or not pieces:
                    pieces.append(Piece([], Page([])))
                    room = limit
                pieces[-1].segments.append(segment)
                room -= segment.high.numel()
        return pieces

    def _house(self, ratio: float, disk: DiskFolder | None) -> None:
        sizes = [self._lay_out(p) for p in self.pieces]
        total, kept, resident = sum(p.elements for p in self.pieces), 0, 0
        for piece in self.pieces:  # the first ones stay
            if kept + piece.elements > total * (1 - ratio) + 0.5:
                break
            kept, resident = kept + piece.elements, resident + 1
        self.share_off = 1 - kept / max(1, total)
        for piece, size in zip(self.pieces[:resident], sizes, strict=False):
            piece.page.regions.append(Region(size, torch.zeros(size, dtype=torch.uint8, device=self.device)))
        away, lengths = self.pieces[resident:], sizes[resident:]
        if disk is None:
            for piece, buffer in zip(away, host_buffers(lengths, self.device), strict=True):
                piece.page.regions.append(Region(buffer.numel(), buffer))
            return
        file, at = disk.create("optimizer.bin", sum(aligned(s) for s in lengths)), 0
        for piece, size in zip(away, lengths, strict=True):
            piece.page.regions.append(Region(size, file=file, offset=at))
            at += aligned(size)

    def _lay_out(self, piece: Piece) -> int:
        """Gives every part of every state its place in the blob; returns the blob's size."""
        at = 0

        def place(shape: Sequence[int], dtype: torch.dtype) -> int:
            nonlocal at
            here, at = at, at + aligned(torch.Size(shape).numel() * dtype.itemsize, 64)
            return here

        for segment in piece.segments:
            shape = segment.high.shape
            if self.split:
                segment.low = place(shape, torch.int16)
            for state in self.rule.states:
                segment.parts[state] = {
                    part: (place(size, dtype), size, dtype)
                    for part, (size, dtype) in segment.codecs[state].shapes(shape).items()
                }
        return at

    def _pieces_of(self) -> dict[nn.Parameter, list[Piece]]:
        found: dict[nn.Parameter, list[Piece]] = {}
        for piece in self.pieces:
            for segment in piece.segments:
                pieces = found.setdefault(segment.parameter, [])
                if piece not in pieces:
                    pieces.append(piece)
        return found

    # --- stepping

    def attach(self, sharded: ShardedModel, known: Take | None) -> None:
        """Takes gradients as they are reduced; with `known` (told of each complete one) it also updates at once."""
        self._sharded, self._known = sharded, known
        if self.split:
            take_reduced_gradients(sharded.units, list(sharded.parameters.values()), self._take)
        elif known is not None:
            for parameter in sharded.parameters.values():
                parameter.register_post_accumulate_grad_hook(self._at_hand)
        if self.device.type == "cuda":
            self._wait_before_use(sharded.units)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of this step so far: what was handed over, or what lies at the parameter."""
        return self._gradients.get(parameter, parameter.grad)

    def _take(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        held = self._gradients.get(parameter)
        if held is None:
            self._gradients[parameter] = gradient
        else:
            local(held).add_(local(gradient))
        if self._known is not None and self._sharded.last:
            self._complete(parameter)

    def _at_hand(self, parameter: torch.Tensor) -> None:
        if self._sharded.last:
            assert isinstance(parameter, nn.Parameter)
            self._complete(parameter)

    @torch.no_grad()
    def _complete(self, parameter: nn.Parameter) -> None:
        """Eagerly: this gradient is the step's; pieces that lacked only this are updated."""
        gradient = self.gradient(parameter)
        assert self._known is not None and gradient is not None
        self._known(parameter, gradient)
        if self._left is None:
            self.steps += 1
            self._left = {piece: len({s.parameter for s in piece.segments}) for piece in self.pieces}
            self.pager.expect([p.page for p in self._order])
            self._order = []
        for piece in self._of[parameter]:
            self._left[piece] -= 1
            if not self._left[piece]:
                self._update_now(piece)
        if all(not self._left[piece] for piece in self._of[parameter]):
            self._forget(piece for piece in self._of[parameter])

    def _update_now(self, piece: Piece) -> None:
        self.pager.begin()
        self._update(piece, None)
        self._order.append(piece)

    def _forget(self, pieces: Iterable[Piece]) -> None:
        """Frees gradients that no piece waits for any more."""
        assert self._left is not None
        for parameter in {s.parameter for piece in pieces for s in piece.segments}:
            if not any(self._left[p] for p in self._of[parameter]):
                self._gradients.pop(parameter, None)
                parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None, scale: torch.Tensor | None = None) -> None:  # type: ignore[override]
        """Updates what is not yet; `scale` (of one element, on the device) multiplies the gradients first."""
        if self._left is None:
            self.steps += 1
            order = self.pieces
            self.pager.expect([p.page for p in order])
        else:
            order = [p for p in self.pieces if self._left[p]]
            self._order += order
        self.pager.begin()
        for piece in order:
            self._update(piece, scale)
        self._gradients.clear()
        self._left = None

    def _wait_before_use(self, units: Sequence[FSDPModule]) -> None:
        """Lets the forward of each unit wait for the updates of its own parameters, and no others."""
        owner: dict[nn.Parameter, nn.Module] = {}
        for unit in units:  # inner ones come later
            assert isinstance(unit, nn.Module)
            owner |= dict.fromkeys(unit.parameters(), unit)
        pages: dict[nn.Module, list[Page]] = {}
        for parameter, unit in owner.items():
            pages.setdefault(unit, []).extend(p.page for p in self._of.get(parameter, []))

        def wait(unit: nn.Module, args: Any) -> None:
            streams = [torch.cuda.current_stream(self.device)]
            context = getattr(unit._get_fsdp_state(), "_comm_ctx", None)  # type: ignore[operator]
            streams += [
                s for n in ("all_gather_copy_in_stream", "all_gather_stream") if (s := getattr(context, n, None))
            ]
            for page in pages[unit]:
                for stream in streams if page.done is not None else []:
                    stream.wait_event(page.done)

        for unit in pages:
            unit.register_forward_pre_hook(wait, prepend=True)

    def _update(self, piece: Piece, scale: torch.Tensor | None) -> None:
        with self.pager.opened(piece.page) as regions:
            for segment in piece.segments:
                gradient = self.gradient(segment.parameter)
                if gradient is not None:
                    self._update_segment(segment, regions[0], local(gradient), scale)

    def _update_segment(
        self, segment: Segment, blob: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        rows = gradient[segment.start : segment.stop]
        if rows.is_cuda:
            gradient.record_stream(self.pager.work)
        rows = rows.float() if scale is None else rows.float() * scale
        high = segment.high
        master = join(high, _view(blob, segment.low, high.shape, torch.int16)) if self.split else high
        stored = {s: {k: _view(blob, *place) for k, place in parts.items()} for s, parts in segment.parts.items()}
        states = {s: [segment.codecs[s].decode(parts, high.shape)] for s, parts in stored.items()}
        group = segment.group
        hyper = Hyper(group["lr"], group["betas"], group["eps"], group["weight_decay"], self.steps)
        self.rule([master], [rows], states, hyper)
        offset = (segment.start + segment.first) * columns(high.shape)
        for index, (state, parts) in enumerate(stored.items()):
            seed = mix(self.steps, zlib.crc32(segment.name.encode()), index)
            segment.codecs[state].encode(states[state][0], parts, seed, offset)
        if self.split:
            split_(master, high, _view(blob, segment.low, high.shape, torch.int16))

    def finish(self) -> None:
        """Returns when the parameters and all states are up to date where they live."""
        self.pager.finish()

    # --- checkpoints

    def entries(self) -> dict[str, Any]:
        """Every state by name, as `optimizer.<parameter>.<state>`, and the masters that are split, as `model.<…>`."""
        self.finish()
        found: dict[str, Any] = {}
        for parameter, pieces in self._of.items():
            name = self._names[parameter]
            segments = [(p, s) for p in pieces for s in p.segments if s.parameter is parameter]
            found[f"optimizer.{name}.step"] = self._step_entry(parameter)
            if self.split:
                found[f"model.{name}"] = self._master_rows(parameter, segments)
            for state in self.rule.states:
                for part, (_, _, dtype) in segments[0][1].parts[state].items():
                    found[f"optimizer.{name}.{part_name(state, part)}"] = self._rows(
                        parameter, segments, state, part, dtype
                    )
        return found

    def _step_entry(self, parameter: nn.Parameter) -> Rows:
        def write(start: int, value: torch.Tensor) -> None:
            self.steps = int(value)

        return Rows(torch.zeros(()), lambda: torch.tensor(float(self.steps)), write)

    def _rows(
        self, parameter: nn.Parameter, segments: list[tuple[Piece, Segment]], state: str, part: str, dtype: torch.dtype
    ) -> Rows:
        def view(piece: Piece, segment: Segment) -> torch.Tensor:
            return _view(_home(piece), *segment.parts[state][part])

        def read() -> torch.Tensor:
            return torch.cat([view(p, s).cpu() for p, s in segments])

        def write(start: int, rows: torch.Tensor) -> None:
            for piece, segment, (target, source) in _overlaps(segments, start, rows):
                view(piece, segment)[target].copy_(rows[source])

        whole, mine = (
            next(size for key, (size, _) in segments[0][1].codecs[state].shapes(shape).items() if key == part)
            for shape in (parameter.shape, local(parameter).shape)
        )
        return Rows(outline(parameter, whole, mine, dtype), read, write)

    def _master_rows(self, parameter: nn.Parameter, segments: list[tuple[Piece, Segment]]) -> Rows:
        def read() -> torch.Tensor:
            halves = [(s.high, _view(_home(p), s.low, s.high.shape, torch.int16)) for p, s in segments]
            return torch.cat([join(high.cpu(), low.cpu()) for high, low in halves])

        def write(start: int, rows: torch.Tensor) -> None:
            for piece, segment, (target, source) in _overlaps(segments, start, rows):
                high, low = segment.high, _view(_home(piece), segment.low, segment.high.shape, torch.int16)
                part = rows[source].float().clone()
                upper, lower = torch.empty_like(part, dtype=high.dtype), torch.empty_like(part, dtype=torch.int16)
                split_(part, upper, lower)
                high[target].copy_(upper)
                low[target].copy_(lower)

        mine = tuple(local(parameter).shape)
        return Rows(outline(parameter, tuple(parameter.shape), mine, torch.float32), read, write)

    def masters(self) -> dict[str, Rows]:
        """Where the values of split parameters are to be written when the model is filled."""
        if not self.split:
            return {}
        return {n.removeprefix("model."): r for n, r in self.entries().items() if n.startswith("model.")}


def splits_masters(run: Run) -> bool:
    """Whether parameters are kept in bf16 with the low half of their masters among the optimizer's states."""
    return run.offload.optimizer != "none" and run.precision == "bf16"


def updates_eagerly(run: Run) -> bool:
    """Whether parameters are updated during backward: asked for, or offloaded with nothing that forbids it."""
    free = run.train.clip is None and run.precision != "fp16"
    return run.train.in_backward or (run.offload.optimizer != "none" and free)


def store_in_bf16(model: nn.Module) -> None:
    """Turns the parameters of a model on `meta` into bf16 ones; buffers stay as they are."""
    made: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                new = nn.Parameter(parameter.detach().to(torch.bfloat16), parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), new)


def offload_optimizer(
    run: Run, sharded: ShardedModel, device: torch.device, disk: DiskFolder | None
) -> OffloadedOptimizer:
    """The optimizer that a run asks for, with its states off the device."""
    train = run.train
    blocks = {id(p) for unit in sharded.units[1:] for p in unit.parameters()}  # type: ignore[attr-defined]
    # The root's own parameters (embedding, head) are gathered at the start of the forward: they come first.
    named = sorted(sharded.parameters.items(), key=lambda item: id(item[1]) in blocks)
    kind: Kind = "8bit" if train.optimizer.endswith("8bit") else "4bit" if train.optimizer.endswith("4bit") else (
        train.optimizer_state)  # fmt: skip
    defaults = {"lr": train.learning_rate, "betas": train.betas, "eps": train.eps}
    ratio = 1.0 if run.offload.ratio == "auto" else float(run.offload.ratio)
    return OffloadedOptimizer(
        decay_groups(sharded.parameters, train.weight_decay), dict(named), rule_of(train.optimizer, train.betas), kind,
        defaults, device, ratio, disk, splits_masters(run),
    )  # fmt: skip


def _home(piece: Piece) -> torch.Tensor:
    """The blob where it lives."""
    region = piece.page.regions[0]
    if region.buffer is not None:
        return region.buffer
    assert region.file is not None
    return region.file.mapped(region.offset, region.size)


def _overlaps(
    segments: list[tuple[Piece, Segment]], start: int, rows: torch.Tensor
) -> Iterator[tuple[Piece, Segment, tuple[slice, slice]]]:
    """The segments that rows from `start` on fall into: rows of the segment, and of those given."""
    stop = start + len(rows)
    for piece, segment in segments:
        low, high = max(start, segment.start), min(stop, segment.stop)
        if low < high:
            yield (
                piece, segment,
                (slice(low - segment.start, high - segment.start), slice(low - start, high - start)),
            )  # fmt: skip


def _view(blob: torch.Tensor, offset: int | None, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    assert offset is not None
    size = torch.Size(shape)
    return blob[offset : offset + size.numel() * dtype.itemsize].view(dtype).view(size)
