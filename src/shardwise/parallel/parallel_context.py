"""What the axes beyond data made of a model, and what a step has to do for them: the loop knows no more of them.

Without such axes every method is the plain thing: one forward after the other, each batch as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.distributed.mesh import World
from shardwise.nn.objective import Loss, Objective
from shardwise.parallel.pipeline.schedule import bubble, picture, simulate

if TYPE_CHECKING:
    from shardwise.parallel.context.install import Context
    from shardwise.parallel.expert.apply import ExpertParallel
    from shardwise.parallel.expert.load_counts import ExpertLoads
    from shardwise.parallel.pipeline.run import Pipeline
    from shardwise.parallel.pipeline.stage import Stages
    from shardwise.parallel.routers.hooks import RouterLosses
    from shardwise.parallel.routers.install import Routing
    from shardwise.parallel.tensor.apply import TensorParallel
    from shardwise.parallel.zero.stages import ShardedModel

EVALUATED = (
    2  # micro-batches per stage that go through a pipeline together when there is no backward
)


@dataclass
class ParallelContext:
    """The axes of a run, each where it is longer than one."""

    world: World
    tensor: TensorParallel | None = None
    context: Context | None = None
    experts: ExpertParallel | None = None
    stages: Stages | None = None
    pipeline: Pipeline | None = None
    loads: ExpertLoads | None = None
    routing: Routing | None = None
    tiny: Any = None  # a model of the same class that runs in one process, for questions about its structure

    def take(self, sharded: ShardedModel) -> None:
        """After sharding: how many ranks hold each part of a parameter, so that a norm counts it once."""
        shared = self.stages.shared if self.stages is not None else {}
        sharded.copies = {
            n: _copies(p) * len(shared.get(n, (0,))) for n, p in sharded.parameters.items()
        }

    @property
    def router_losses(self) -> RouterLosses | None:
        """What watches the routers of a model that has such."""
        return None if self.routing is None else self.routing.losses

    @property
    def biases(self) -> list[str]:
        """Tensors that move without a gradient, as patterns of their names."""
        bias = None if self.routing is None else self.routing.bias
        return [] if bias is None else list(bias.patterns)

    def after_step(self, taken: torch.Tensor | bool) -> None:
        """What comes after the optimizer's step; `taken`: whether that changed the parameters."""
        if self.routing is not None and self.routing.bias is not None:
            self.routing.bias(taken)

    @property
    def counts(self) -> bool:
        """Whether this rank's losses are to be added up: others along `tensor` have the same, other stages none."""
        return self.world.place.tensor == 0 and (self.stages is None or self.stages.is_last)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around forwards and backwards."""
        with self.tensor.active() if self.tensor is not None else nullcontext():
            yield

    def share(self, batch: Any) -> Any:
        """This rank's part of a micro-batch, on its device."""
        batch = batch.to(self.world.device)
        return batch if self.context is None else self.context.split(batch)

    def annotate(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Adds to the last record how many tokens each expert got since the one before; collective."""
        if self.loads is None or not records:
            return records
        counts = self.loads.read()
        self.loads.reset()
        # Ranks along `tensor` have counted the same tokens, other stages other layers.
        mine = (
            dict(zip(self.loads.layers, counts.tolist(), strict=True))
            if self.world.place.tensor == 0
            else {}
        )
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.world.control)
        total = {
            layer: [
                sum(each)
                for each in zip(*(one[layer] for one in everyone if layer in one), strict=True)
            ]
            for layer in self.loads.layers
        }
        if (balance := self.loads.balance(torch.tensor(list(total.values())))) is not None:
            records[-1]["experts"] = {"worst": balance.worst, "mean": balance.mean, "tokens": total}
        return records

    def idle(self) -> list[str]:
        """How long the stages waited in the latest step, beside what their order costs on paper, drawn; collective."""
        if self.pipeline is None or not self.pipeline.record:
            return []
        spans, ranks = self.pipeline.all_spans(), self.world.layout.pipeline
        if not spans:
            return []
        times: dict[str, list[float]] = {}
        for span in spans:
            times.setdefault(span.action.kind, []).append(span.end - span.begin)
        mean = {kind: sum(all_of) / len(all_of) for kind, all_of in times.items()}
        micros = 1 + max(span.action.micro for span in spans)
        paper = simulate(self.pipeline.schedule, ranks, micros, lambda action: mean[action.kind])
        told = f"{bubble(spans, ranks):.0%} of the stages' time idle, {bubble(paper, ranks):.0%} on paper"
        title = (
            f"pipeline, last step ({self.pipeline.schedule.style}, {micros} micro-batches): {told}"
        )
        return [title, *picture(spans, ranks, width=72).splitlines()]

    @property
    def together(self) -> int:
        """Micro-batches that an evaluation takes at a time."""
        return 1 if self.stages is None else EVALUATED * self.world.layout.pipeline

    def losses(self, model: Any, objective: Objective, batches: list[Any]) -> list[Loss]:
        """Without backward; none where another stage knows them."""
        with self.active():
            if self.pipeline is not None:
                found: list[Loss] = self.pipeline.evaluate(batches, self._computing(objective))
                return found
            return [self.loss(model, objective, batch) for batch in batches]

    def learn(
        self,
        model: Any,
        objective: Objective,
        batches: list[Any],
        to_backward: Callable[[Loss], torch.Tensor],
        prepare: Callable[[bool], None],
    ) -> list[Loss]:
        """Through the pipeline: forward and backward of all micro-batches; `prepare` as of ShardedModel."""
        assert self.pipeline is not None and self.stages is not None
        with self.active():
            found: list[Loss] = self.pipeline.step(
                batches, self._computing(objective), to_backward, lambda chunk, last: prepare(last)
            )
        self.stages.sum_shared_gradients()
        return found

    def loss(self, model: Any, objective: Objective, batch: Any) -> Loss:
        """Of this rank's part of a micro-batch; zeros where its rows count nothing."""
        part = self.share(batch)
        if batch.counts:
            return objective(model, part)
        with self.loads.ignored() if self.loads is not None else nullcontext():
            return objective(model, part).uncounted()

    def _computing(self, objective: Objective) -> Callable[[Any, Any], Loss]:
        return lambda model, batch: self.loss(model, objective, batch)


def _copies(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(
        mesh.size(axis) for axis, p in enumerate(parameter.placements) if p.is_replicate()
    )
