"""One rank's set-up and steps, for real but on tensors without memory: what the cluster would have said, now.

What is rehearsed is the code that trains (train/setup.py, train/loop.py): the model is built, divided and sharded on
`meta`, gets fake tensors for memory, and takes a step to warm up (optimizer states come to be in it) and one to watch.
What depends on values is asked of a tiny model of the same class, which runs for real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.config.schema import Run
from shardwise.core.compat.torch_private import FakeTensorMode, unset_fake_temporarily
from shardwise.core.effective_device import acting
from shardwise.data.documents import Documents
from shardwise.data.loader import StepBatch
from shardwise.distributed.mesh import World
from shardwise.foresight.rehearse.batch import step_batch
from shardwise.foresight.rehearse.kernels import gpu_kernels, grouped_products
from shardwise.foresight.rehearse.nodisk import NoDisk
from shardwise.foresight.rehearse.tracker import StepTracker
from shardwise.foresight.rehearse.world import fake_world
from shardwise.nn.models.build import materialise, vocabulary_size
from shardwise.nn.models.source import ModelSource
from shardwise.nn.tiny.case import tiny_case
from shardwise.objectives.make import make_objective
from shardwise.observe.breakdown import OFF
from shardwise.optim.scaler import LossScaler
from shardwise.parallel.offload.disk import DiskFolder
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.offload.policy import eager_share
from shardwise.parallel.selfcheck import UnshardedModel, check_documents
from shardwise.parallel.zero.tuning import tune
from shardwise.parallel.zero.update import OptimizerStep
from shardwise.resolved_run import ResolvedRun
from shardwise.train.loop import accumulate
from shardwise.train.setup import build_model, build_optimizer

ENOUGH = 2  # micro-batches that show what more of them would


@dataclass(frozen=True)
class Rehearsal:
    """What a rank did in a step, and how long it took to find out."""

    rank: int
    ranks: int
    place: dict[str, int]
    tracker: StepTracker
    micro_batches: int  # of the step that was watched
    held: dict[str, int]  # between steps, by category
    seconds: float


class Alike(dict[Any, Any]):
    """What passes between stages, by chunk, kind of pass and shapes: a chunk that was never seen gets what others get.

    So the first stage must be rehearsed before any other, and blocks must all take the same.
    """

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._like(key) is not None

    def __missing__(self, key: Any) -> Any:
        return self[self._like(key)]

    def _like(self, key: Any) -> Any:
        return next((other for other in self if other[1:] == key[1:]), None)


@dataclass
class StepState:
    """What `accumulate` wants of the training's state."""

    sharded: Any
    context: Any
    objective: Any
    scaler: Any
    update: Any
    world: World
    loader: Any
    timer: Any = OFF


class _OneSource:
    source_count = 1


def rehearse(
    source: ModelSource,
    run: Run,
    rank: int,
    ranks: int,
    micro_batches: int | None = None,
    documents: int = 1,
    known: Alike | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Rehearsal:
    """A step of one rank. `known`: what stages of a pipeline hand on, from those that were rehearsed before."""
    begun = time.perf_counter()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_world(run, rank, ranks) as world, acting(run.device), gpu_kernels(run.device), grouped_products():
        say("building the model")
        state, optimizer = set_up(source, run, world, fake, say)
        per_rank = run.train.batch_size // world.layout.data // int(run.train.micro_batch_size)
        count = micro_batches or min(per_rank, max(ENOUGH, 2 * run.parallel.pipeline))
        batch = step_batch(run, count, documents)
        pipeline = state.context.pipeline
        if pipeline is not None:
            pipeline._known = Alike() if known is None else known
        with fake:
            tracker, held = watch(state, optimizer, batch, say)
        place = {a: getattr(world.place, a) for a in ("pipeline", "data", "context", "tensor")}
    return Rehearsal(rank, ranks, place, tracker, count, held, time.perf_counter() - begun)


def set_up(
    source: ModelSource,
    run: Run,
    world: World,
    fake: FakeTensorMode | None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[StepState, torch.optim.Optimizer]:
    """A rank's state of training, without data; in memory, uninitialised, where tensors are not fake."""
    job = ResolvedRun(run, {}, source, None, None, None, Path(run.output))  # type: ignore[arg-type]

    def allocate(model: Any, device: torch.device) -> None:
        with fake or nullcontext():
            materialise(model, device)
            for module in model.modules():
                for name, buffer in list(module._buffers.items()):
                    if buffer is not None and fake is not None:
                        module._buffers[name] = fake.from_tensor(buffer)

    alone = dist.get_backend() == "fake"  # a network that is not there cannot be measured
    choose = None if alone else partial(tune, run, world, say=say)
    sharded, context = build_model(job, world, materialise=allocate, choose=choose)
    asked = UnshardedModel(context.tiny if context.tiny is not None else tiny_case(source).model().float())
    with acting("cpu"):
        vocabulary = vocabulary_size(asked.model)
        apart = check_documents(asked, vocabulary, job, asked.device, say)
        objective = make_objective(job, world, sharded, apart, asked, say, context.router_losses, context)
    with fake or nullcontext():
        disk: Any = NoDisk() if fake is not None else DiskFolder(job.offload_folder, world.rank, world.size)
        optimizer = build_optimizer(job, world, sharded, disk)
    if fake is not None:
        _share_for_real(context, fake)
    scaler = LossScaler(world.device.type, run.loss_scale, enabled=run.precision == "fp16")
    accumulates = run.train.batch_size > int(run.train.micro_batch_size) * world.layout.data
    update = OptimizerStep(
        sharded, optimizer, scaler, run.train.max_grad_norm, eager_share(run), accumulates, then=context.after_step
    )  # fmt: skip
    return StepState(sharded, context, objective, scaler, update, world, _OneSource()), optimizer


def watch(
    state: StepState, optimizer: torch.optim.Optimizer, batch: StepBatch, say: Callable[[str], None] = lambda _: None
) -> tuple[StepTracker, dict[str, int]]:
    """A step to warm up and one that is followed; with what is held between steps, by category. Fake or real."""
    say("warming up")
    take_step(state, replace(batch, micro_batches=batch.micro_batches[:1]) if state.context.pipeline is None else batch)
    tracker = StepTracker(state.sharded.model)
    tracker.hold(list(state.sharded.model.parameters()), "parameters")
    tracker.hold(list(state.sharded.model.buffers()), "buffers")
    tracker.hold([list(state.values()) for state in optimizer.state.values()], "optimizer")
    if isinstance(optimizer, OffloadedOptimizer):
        tracker.hold(optimizer.buffers(), "optimizer")
    held = _held(tracker)
    say("one step")
    tracker.peak, tracker.peak_time = tracker.now, tracker.time
    with tracker.follow():
        take_step(state, batch, tracker)
    return tracker, held


def take_step(state: StepState, batch: StepBatch, tracker: StepTracker | None = None) -> None:
    """Forward, backward and update, as the loop does them."""
    if tracker is not None:
        tracker.begin("step")
    accumulate(state, batch)  # type: ignore[arg-type]
    if tracker is not None:
        tracker.begin("update")
    state.update()


def _share_for_real(context: Any, fake: FakeTensorMode) -> None:
    """A rank's part of a batch is cut out of real tensors, whose values decide it, and goes on as fake ones."""
    plain = context.share

    def share(batch: Any) -> Any:
        with unset_fake_temporarily():
            shared = plain(batch)
        values = {k: _faked(v, fake) for k, v in vars(shared).items()}
        return replace(shared, **values)

    context.share = share


def _faked(value: Any, fake: FakeTensorMode) -> Any:
    if isinstance(value, Documents):
        return replace(value, boundaries=fake.from_tensor(value.boundaries))
    return fake.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _held(tracker: StepTracker) -> dict[str, int]:
    found: dict[str, int] = {}
    for block in tracker.blocks:
        found[block.category] = found.get(block.category, 0) + block.size
    return found
