"""Runs a schedule: forwards and backwards in its order, with what passes between stages.

torch's own executor wants micro-batches of one shape; ours differ in width. Every stage is given
the same micro-batches and calls the same function on them, which comes to its end on the last stage
alone (see `NonLastOutput`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardwise.distributed.shared_gpu import goes_by_host
from shardwise.parallel.pipeline.comm import StageComm, StageLinks, make_links, shapes_of
from shardwise.parallel.pipeline.programs import Exchange, Program, programs
from shardwise.parallel.pipeline.schedule import Action, ActionSpan, Schedule
from shardwise.parallel.pipeline.split_backward import (
    backward_of_inputs,
    backward_of_weights,
    check_split,
    finish_split,
)
from shardwise.parallel.pipeline.stage import ChunkForward, StageIO, Stages

Compute = Callable[[Any, Any], Any]


class Pipeline:
    """The ranks of a group as one pipeline; all ranks of the run make theirs at the same time.

    `meshes` are those over which tensors between blocks are sharded. With `record`, the times of
    the latest step's actions are in `spans`.
    """

    def __init__(
        self,
        stages: Stages,
        group: dist.ProcessGroup,
        schedule: Schedule,
        device: torch.device,
        meshes: Sequence[DeviceMesh] = (),
        links: StageLinks | None = None,
    ) -> None:
        self.stages, self.group, self.schedule, self.device = stages, group, schedule, device
        self.links = links or make_links(group, device, sorted(set(stages.shared.values())))
        self.owners = schedule.owners(stages.ranks)
        on_device = device.type == "cuda" and not goes_by_host(self.links.tensors)
        self.stream = torch.cuda.Stream(device) if on_device else None
        self.record = False
        self.spans: list[ActionSpan] = []
        stages.device, stages.meshes = device, meshes
        stages.connect(self.links.sums)
        self._known: dict[Any, Any] = {}
        self._checked = False

    def step(
        self,
        micro_batches: Sequence[Any],
        compute: Compute,
        to_backward: Callable[[Any], torch.Tensor],
        before_backward: Callable[[int, bool], None] = lambda chunk, last: None,
    ) -> list[Any]:
        """Forward and backward of all micro-batches.

        Returns what `compute` returned, detached, on the last stage, and [] on the others.
        `before_backward` gets the chunk and whether this is its last backward of the step (with
        split backwards: once, after all). Gradients of parameters that several stages share are
        not summed yet: `stages.sum_shared_gradients()`.
        """
        if self.schedule.splits and not self._checked:  # now that the model is sharded, if it is
            check_split(self.stages.model, self.stages.blocks)
            self._checked = True
        program = self._program(micro_batches, forwards_only=False)
        return _PipelineStep(
            self, program, micro_batches, compute, to_backward, before_backward
        ).run()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any], compute: Compute) -> list[Any]:
        """Forwards alone; what `compute` returned on the last stage, [] on the others."""
        program = self._program(micro_batches, forwards_only=True)
        return _PipelineStep(self, program, micro_batches, compute).run()

    def _program(self, micro_batches: Sequence[Any], forwards_only: bool) -> Program:
        ranks = self.stages.ranks
        return programs(self.schedule, ranks, len(micro_batches), forwards_only)[self.stages.rank]

    def logits(self, **inputs: Any) -> torch.Tensor:
        """The model's logits, on every rank."""
        found = self.evaluate([inputs], lambda model, given: model(**given).logits)
        told: list[Any] = [(found[0].shape, found[0].dtype) if found else None]
        source = dist.get_global_rank(self.group, self.owners[-1])
        dist.broadcast_object_list(told, src=source, group=self.group)
        shape, dtype = told[0]
        logits: torch.Tensor = (
            found[0].contiguous() if found else torch.empty(shape, dtype=dtype, device=self.device)
        )
        dist.broadcast(logits, src=source, group=self.group)
        return logits

    def all_spans(self) -> list[ActionSpan]:
        """The latest step's actions on all ranks, where they were recorded; collective."""
        gathered: list[Any] = [None] * self.stages.ranks
        dist.all_gather_object(gathered, self.spans, group=self.group)
        return [span for spans in gathered for span in spans]


class _PipelineStep:
    """One step under way on one rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        program: Program,
        micro_batches: Sequence[Any],
        compute: Compute,
        to_backward: Callable[[Any], torch.Tensor] | None = None,
        before_backward: Callable[[int, bool], None] | None = None,
    ) -> None:
        stages = pipeline.stages
        self._stages, self._micros, self._compute = stages, micro_batches, compute
        self._to_backward, self._before_backward = to_backward, before_backward
        self._owners = pipeline.owners
        self._program = program
        self._comm = StageComm(
            pipeline.links,
            stages.rank,
            pipeline.owners,
            [shapes_of(micro) for micro in micro_batches],
            pipeline._known,
            pipeline.device,
            pipeline.stream,
        )
        timed = pipeline.record and to_backward is not None
        self._clock = _Clock(stages.rank, pipeline.device) if timed else None
        self._pipeline = pipeline
        self._passed: dict[tuple[int, int], ChunkForward] = {}
        self._local: dict[Any, Any] = {}  # between two chunks of this rank
        self._weights: dict[tuple[int, int], Any] = {}
        self._results: dict[int, Any] = {}
        self._left = dict.fromkeys(
            stages.chunks, 0
        )  # backwards of each chunk that are still to come
        for item in program:
            if isinstance(item, Action) and item.kind in ("backward", "input"):
                self._left[item.chunk] += 1

    def run(self) -> list[Any]:
        do = {
            "forward": self._forward,
            "backward": self._backward,
            "input": self._input,
            "weight": self._weight,
        }
        for item in self._program:
            if isinstance(item, Exchange):
                self._comm.exchange(item)
                continue
            if self._stages.carried is not None:  # what backward recomputes is of this micro-batch
                self._stages.carried.enter(item.micro)
            do[item.kind](item)
        self._comm.finish()
        if self._pipeline.schedule.splits and self._before_backward is not None:
            self._before_backward(self._stages.chunks[-1], True)
            finish_split(self._stages.model)
        if self._clock is not None:
            self._pipeline.spans = self._clock.spans()
        return [self._results[micro] for micro in sorted(self._results)]

    def _forward(self, action: Action) -> None:
        _, chunk, micro = action
        wire = self._incoming(chunk, micro)
        model = self._stages.model
        with self._timed(action):
            passed = self._stages.forward(
                chunk, wire, lambda: self._compute(model, self._micros[micro])
            )
        if self._to_backward is not None:
            self._passed[chunk, micro] = passed
        if passed.wire is None:
            self._results[micro] = _detached(passed.result)
        elif self._owners[chunk + 1] == self._stages.rank:
            self._local["forward", chunk + 1, micro] = passed.wire
        else:
            self._comm.send(chunk + 1, micro, passed.wire.ports, passed.wire.tensors)

    def _incoming(self, chunk: int, micro: int) -> StageIO | None:
        if chunk == 0:
            return None
        if (wire := self._local.pop(("forward", chunk, micro), None)) is not None:
            return wire  # type: ignore[no-any-return]
        ports, tensors = self._comm.receive("forward", chunk, micro)
        return StageIO(ports, tuple(tensors))

    def _backward(self, action: Action) -> None:
        passed, outputs, gradients = self._outgoing(action)
        self._announce(action)
        with self._timed(action):
            made = outputs or [self._to_backward(passed.result)]  # type: ignore[misc]
            if made[0].requires_grad:
                torch.autograd.backward(made, gradients)
        self._return(action, passed)

    def _input(self, action: Action) -> None:
        passed, outputs, gradients = self._outgoing(action)
        self._announce(action)
        weights = [p for p in self._stages.model.parameters() if p.requires_grad]
        with self._timed(action):
            made = outputs or [self._to_backward(passed.result)]  # type: ignore[misc]
            kept = backward_of_inputs(made, gradients, passed.given, weights)
        self._weights[action.chunk, action.micro] = (weights, kept)
        self._return(action, passed)

    def _weight(self, action: Action) -> None:
        weights, kept = self._weights.pop((action.chunk, action.micro))
        with self._timed(action):
            backward_of_weights(weights, kept)

    def _outgoing(
        self, action: Action
    ) -> tuple[ChunkForward, list[torch.Tensor], list[torch.Tensor] | None]:
        """What was made in the forward, and the gradients that came back for it."""
        _, chunk, micro = action
        passed = self._passed.pop((chunk, micro))
        if passed.wire is None:
            return passed, [], None
        if self._owners[chunk + 1] == self._stages.rank:
            return passed, passed.wire.differentiable, self._local.pop(("backward", chunk, micro))
        return passed, passed.wire.differentiable, self._comm.receive("backward", chunk, micro)[1]

    def _return(self, action: Action, passed: ChunkForward) -> None:
        """Hands the gradients of what came by wire to where it came from."""
        _, chunk, micro = action
        if chunk == 0:
            return
        wanted = [tensor for tensor in passed.given if tensor.requires_grad]
        gradients = [
            tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for tensor in wanted
        ]
        if self._owners[chunk - 1] == self._stages.rank:
            self._local["backward", chunk - 1, micro] = gradients
        else:
            self._comm.send_back(chunk - 1, micro, gradients)

    def _announce(self, action: Action) -> None:
        """Tells the loop, and FSDP, which drops its state of forwards after the last backward."""
        self._left[action.chunk] -= 1
        model: Any = self._stages.model
        if isinstance(model, FSDPModule):
            model.set_is_last_backward(action.kind == "backward" and not any(self._left.values()))
        assert self._before_backward is not None
        self._before_backward(
            action.chunk, action.kind == "backward" and self._left[action.chunk] == 0
        )

    def _timed(self, action: Action) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._clock is None else self._clock.timed(action)


def _detached(value: Any) -> Any:
    """A result without its graph, which would keep the activations of a whole step."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: _detached(getattr(value, field.name)) for field in fields(value)}
        )
    if isinstance(value, dict):
        return {key: _detached(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_detached(one) for one in value)
    return value


class _Clock:
    """Times actions, by the device's own clock where it has one: the host runs ahead of it."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._cuda = rank, device.type == "cuda"
        self._start = self._now()
        self._marks: list[tuple[Action, Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def timed(self, action: Action) -> Iterator[None]:
        begin = self._now()
        yield
        self._marks.append((action, begin, self._now()))

    def spans(self) -> list[ActionSpan]:
        if self._cuda:
            torch.cuda.synchronize()
        return [
            ActionSpan(self._rank, action, self._since(begin), self._since(end))
            for action, begin, end in self._marks
        ]

    def _since(self, moment: Any) -> float:
        return float(
            self._start.elapsed_time(moment) / 1000 if self._cuda else moment - self._start
        )
