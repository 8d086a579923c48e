"""The tensor, context, expert and pipeline axes of a run, behind one interface for the loop.

Without such axes every method does the plain thing: one forward after the other, on full batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.distributed.mesh import World
from shardwise.nn.objective import Loss, Objective, prepared
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

EVALUATED = 2  # micro-batches per stage in a pipeline at a time, without backward


@dataclass
class ParallelContext:
    """What each axis of a run with more than one rank has made of the model."""

    world: World
    tensor: TensorParallel | None = None
    context: Context | None = None
    experts: ExpertParallel | None = None
    stages: Stages | None = None
    pipeline: Pipeline | None = None
    loads: ExpertLoads | None = None
    routing: Routing | None = None
    tiny: Any = None  # a tiny unsharded model of the class, whose structure can be examined
    _sharded: ShardedModel | None = None

    def take(self, sharded: ShardedModel) -> None:
        """Sets how many ranks hold each part of a parameter, so that norms count it once."""
        shared = self.stages.shared if self.stages is not None else {}
        late = self.stages.complete_late if self.stages is not None else ()
        sharded.replication_factors = {}
        for name, parameter in sharded.parameters.items():
            stages = len(shared.get(name, (0,)))
            sharded.replication_factors[parameter] = _copies(parameter) * stages
        sharded.complete_late = frozenset(p for n, p in sharded.parameters.items() if n in late)
        self._sharded = sharded

    @property
    def router_losses(self) -> RouterLosses | None:
        """The losses of the model's routers, if it has any."""
        return None if self.routing is None else self.routing.losses

    @property
    def biases(self) -> list[str]:
        """Name patterns of the tensors that are updated without gradients."""
        if self.routing is None or self.routing.bias is None:
            return []
        return list(self.routing.bias.patterns)

    def after_step(self, taken: torch.Tensor | bool) -> None:
        """Updates router biases; `taken`: whether the optimizer changed the parameters."""
        if self.routing is not None and self.routing.bias is not None:
            self.routing.bias(taken)

    @property
    def counts(self) -> bool:
        """Whether this rank's losses count: one rank along `tensor`, the last stage."""
        return self.world.place.tensor == 0 and (self.stages is None or self.stages.is_last)

    @property
    def parts(self) -> dist.ProcessGroup | None:
        """The ranks that have parts of the same sequences, if these are divided."""
        mesh = self.world.context if self.context is not None else None
        return None if mesh is None else mesh.get_group()

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context that forwards and backwards run in."""
        with self.tensor.active() if self.tensor is not None else nullcontext():
            yield

    def share(self, batch: Any) -> Any:
        """This rank's part of a micro-batch, on its device."""
        batch = batch.to(self.world.device)
        if self.context is None:
            return batch
        return self.context.split(batch)

    def annotate(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Adds the tokens of each expert since the previous record to the last one; collective."""
        if self.loads is None or not records:
            return records
        counts = self.loads.read()
        self.loads.reset()
        # Ranks along `tensor` counted the same tokens, other stages other layers.
        local: dict[str, list[int]] = {}
        if self.world.place.tensor == 0:
            local = dict(zip(self.loads.layers, counts.tolist(), strict=True))
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, local, group=self.world.control)
        total: dict[str, list[int]] = {}
        for layer in self.loads.layers:
            by_rank = [loads[layer] for loads in everyone if layer in loads]
            total[layer] = [sum(tokens) for tokens in zip(*by_rank, strict=True)]
        balance = self.loads.balance(torch.tensor(list(total.values())))
        if balance is not None:
            records[-1]["experts"] = {"worst": balance.worst, "mean": balance.mean, "tokens": total}
        return records

    def idle(self) -> list[str]:
        """The idle time of the stages in the latest step, with a timeline; collective."""
        if self.pipeline is None or not self.pipeline.record:
            return []
        spans = self.pipeline.all_spans()
        ranks = self.world.layout.pipeline
        if not spans:
            return []
        times: dict[str, list[float]] = {}
        for span in spans:
            times.setdefault(span.action.kind, []).append(span.end - span.begin)
        mean = {kind: sum(seconds) / len(seconds) for kind, seconds in times.items()}
        micros = 1 + max(span.action.micro for span in spans)
        schedule = self.pipeline.schedule
        ideal = simulate(schedule, ranks, micros, lambda action: mean[action.kind])
        measured = f"{bubble(spans, ranks):.0%} of the stages' time idle"
        title = (
            f"pipeline, last step ({schedule.style}, {micros} micro-batches): "
            f"{measured}, {bubble(ideal, ranks):.0%} on paper"
        )
        return [title, *picture(spans, ranks, width=72).splitlines()]

    @property
    def together(self) -> int:
        """Micro-batches that an evaluation runs at a time."""
        return 1 if self.stages is None else EVALUATED * self.world.layout.pipeline

    def losses(self, model: Any, objective: Objective, batches: list[Any]) -> list[Loss]:
        """Losses of micro-batches, without backward; empty if another stage computes them."""
        with self.active():
            if self.pipeline is not None:
                asked = prepared(objective, batches)
                losses: list[Loss] = self.pipeline.evaluate(asked, self._computing(objective))
                return losses
            return [self.loss(model, objective, batch) for batch in batches]

    def answers(
        self,
        model: Any,
        batches: list[Any],
        compute: Callable[[Any, Any], Any],
        absent: Callable[[Any], Any],
    ) -> list[Any]:
        """`compute` of a model and this rank's part of each micro-batch, without gradients.

        On stages before the last `absent` of the part, which has the same shapes: stages agree on
        those of micro-batches. For frozen second models, and for a model without its adapters.
        """

        def ask(model: Any, batch: Any) -> Any:
            return compute(model, self.share(batch))

        with torch.no_grad(), self.active(), self._uncounted():
            if self.pipeline is None:
                return [ask(model, batch) for batch in batches]
            answers = self.pipeline.evaluate(batches, ask)
            return answers or [absent(self.share(batch)) for batch in batches]

    def learn(
        self,
        model: Any,
        objective: Objective,
        batches: list[Any],
        to_backward: Callable[[Loss], torch.Tensor],
        prepare: Callable[[bool, bool], None],
    ) -> list[Loss]:
        """Forward and backward of all micro-batches through the pipeline.

        `prepare` is that of ShardedModel.
        """
        assert self.pipeline is not None and self.stages is not None
        running = set(self.stages.chunks)
        splits = self.pipeline.schedule.splits

        def before_backward(chunk: int, last: bool) -> None:
            if last:
                running.discard(chunk)
            prepare(last, splits or not running)

        with self.active():
            asked = prepared(objective, batches)
            losses: list[Loss] = self.pipeline.step(
                asked, self._computing(objective), to_backward, before_backward
            )
        assert self._sharded is not None
        self.stages.sum_shared_gradients(self._sharded.gradient_of)
        return losses

    def loss(self, model: Any, objective: Objective, batch: Any) -> Loss:
        """The loss of this rank's part of a micro-batch; zero if its rows do not count."""
        return self._prepared_loss(model, objective, prepared(objective, [batch])[0])

    def _prepared_loss(self, model: Any, objective: Objective, batch: Any) -> Loss:
        part = self.share(batch)
        if batch.counts:
            return objective(model, part)
        with self._uncounted():
            return objective(model, part).uncounted()

    def _uncounted(self) -> AbstractContextManager[None]:
        """The context of forwards whose tokens no expert's load counts."""
        return self.loads.ignored() if self.loads is not None else nullcontext()

    def _computing(self, objective: Objective) -> Callable[[Any, Any], Loss]:
        return lambda model, batch: self._prepared_loss(model, objective, batch)


def _copies(parameter: torch.Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    copies = 1
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            copies *= mesh.size(axis)
    return copies
