"""Builds the loop's state from a resolved run.

Order: assemble (parallel/parallelize.py) → optimizer → fill → check → resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.copies import MemoryCheckpoints, NoMemoryCheckpoints
from shardwise.checkpoint.store import CheckpointStore, set_aside
from shardwise.config.methods import Full
from shardwise.config.schema import Run
from shardwise.core.effective_device import as_written
from shardwise.core.errors import UserError
from shardwise.core.hardware.flops import flops_per_token, peak_flops
from shardwise.data.loader import Loader
from shardwise.distributed.lazy_rows import LazyShardedTensor
from shardwise.distributed.mesh import World
from shardwise.nn.adapters.fill import fill_adapters
from shardwise.nn.models.build import (
    build_on_meta,
    fill_random,
    find_blocks,
    materialise,
    vocabulary_size,
)
from shardwise.nn.models.weights import load_weights, new_parameters
from shardwise.nn.objective import Objective
from shardwise.objectives.make import make_objective
from shardwise.observe.breakdown import OFF, Timer, timer_for
from shardwise.observe.pace import SampledTimer
from shardwise.optim import build
from shardwise.optim.scaler import LossScaler
from shardwise.parallel.context.install import Context
from shardwise.parallel.offload.checkpoint_entries import masters
from shardwise.parallel.offload.disk import DiskFolder
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.offload.policy import (
    eager_share,
    offload_optimizer,
    split_in,
)
from shardwise.parallel.parallel_context import ParallelContext
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.selfcheck import CallsWhole, UnshardedModel, check_documents
from shardwise.parallel.zero.overlap import CommSettings, requested_comm
from shardwise.parallel.zero.stages import ShardedModel
from shardwise.parallel.zero.timed_collectives import watch_collectives
from shardwise.parallel.zero.tuning import tune
from shardwise.parallel.zero.units import explain_shard_access
from shardwise.parallel.zero.update import OptimizerStep
from shardwise.resolved_run import ResolvedRun
from shardwise.train.describe import changed_settings
from shardwise.train.meter import Meter, Work
from shardwise.train.resume import Start, damage_records, damage_warnings, find_start
from shardwise.train.state import Position, restore
from shardwise.train.status import Status, logs_of


@dataclass
class TrainState:
    """Everything the loop uses."""

    job: ResolvedRun
    world: World
    sharded: ShardedModel
    objective: Objective
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    update: OptimizerStep
    loader: Loader
    eval_loader: Loader | None
    store: CheckpointStore
    position: Position
    meter: Meter
    status: Status
    context: ParallelContext
    timer: Timer = OFF
    copies: MemoryCheckpoints | NoMemoryCheckpoints = field(default_factory=NoMemoryCheckpoints)
    damaged: list[dict[str, Any]] = field(default_factory=list)  # records of damaged checkpoints


def build_model(
    job: ResolvedRun,
    world: World,
    timer: Timer = OFF,
    materialise: Callable[[Any, torch.device], None] = materialise,
    choose: Callable[[Any, list[tuple[str, Any]]], CommSettings] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[ShardedModel, ParallelContext]:
    """The run's model, parallelised, with allocated but unset parameters.

    At stage 3 no rank ever holds the full model. `choose` decides the communication settings, by
    default the config does. `say` receives a line for each step of the assembly.
    """
    model = build_on_meta(job.source)
    sharded, context = parallelize(
        model, job.run, world, job.source, timer, materialise, choose, say
    )
    model.train()
    return sharded, context


def fill_model(
    job: ResolvedRun, sharded: ShardedModel, through: Mapping[str, LazyShardedTensor]
) -> None:
    """Writes the initial values, from files or random; split parameters go `through` masters."""
    if job.source.weights is not None:
        load_weights(sharded.model, job.source.weights, through)
        if new := new_parameters(sharded.model, job.source.weights):
            fill_random(sharded.model, job.source, job.run.train.seed, through, new)
    else:
        fill_random(sharded.model, job.source, job.run.train.seed, through)
    if not isinstance(job.run.method, Full):
        fill_adapters(sharded, job.run.train.seed, job.run.method.adapter, through)


def build_optimizer(
    job: ResolvedRun,
    world: World,
    sharded: ShardedModel,
    disk: DiskFolder,
    say: Callable[[str], None] = lambda _: None,
) -> torch.optim.Optimizer:
    """The optimizer over the sharded parameters, with its states placed by `run.offload`."""
    run = job.run
    if run.offload.optimizer == "none" and not split_in(run):
        return build.build_optimizer(sharded.parameters, run.train, sharded.model)
    return offload_optimizer(run, sharded, world.device, disk, say)


def build_state(
    job: ResolvedRun,
    world: World,
    status: Status,
    say: Callable[[str], None] = lambda _: None,
    disk: DiskFolder | None = None,
) -> TrainState:
    """Builds and checks the run, and resumes if there is a checkpoint.

    The caller removes the files in `disk`.
    """
    run = job.run
    disk = disk or DiskFolder(job.offload_folder, world.rank, world.size)
    status.set("loading the model")
    timer = _timer(run, world)
    steps: list[str] = []
    choose = partial(tune, run, world, say=say, output=job.output)
    sharded, context = build_model(job, world, timer, choose=choose, say=steps.append)
    if world.is_main:
        _write_assembly(job.output, steps)
    optimizer = build_optimizer(job, world, sharded, disk, say)
    split: Mapping[str, LazyShardedTensor] = {}
    if isinstance(optimizer, OffloadedOptimizer):
        split = masters(optimizer, sharded.model)
    fill_model(job, sharded, split)

    status.set("checking the model")
    unsharded: CallsWhole = sharded if context.tiny is None else UnshardedModel(context.tiny)
    documents = _check_model(job, unsharded, context, say)

    status.set("resuming")
    scaler = LossScaler(world.device.type, run.loss_scale, enabled=run.precision == "fp16")
    if run.resume == "never" and world.is_main:
        set_aside(job.output)
    root = job.output / "checkpoints"
    store = CheckpointStore(root, run.checkpoint.keep, run.checkpoint.async_save, world.checkpoint)
    copies = _memory_checkpoints(run, world, root)
    start = find_start(run.resume, root, copies, world.control)
    position = _resume(job, world, sharded, optimizer, start, say)
    if position.scaler:
        scaler.load_state_dict(position.scaler)
    _report_start(job, start, position, copies, say)
    copies.began(position.step)

    def settle() -> None:
        store.settle()
        copies.settle()

    accumulates = run.train.batch_size > int(run.train.micro_batch_size) * world.layout.data
    update = OptimizerStep(
        sharded,
        optimizer,
        scaler,
        run.train.max_grad_norm,
        eager_share(run),
        accumulates,
        settle,
        context.after_step,
    )
    loader = job.loader()
    with as_written(run.compiled):
        objective = make_objective(
            job, world, sharded, documents, unsharded, say, context.router_losses, context
        )
    meter = _meter(job, world, sharded, position, loader.names, objective.figures)
    watch_collectives(sharded.model, timer)  # last: around the replacements of FSDP's collectives
    damaged = damage_records(start, position.step) if start.folder is not None else []
    return TrainState(
        job=job,
        world=world,
        sharded=sharded,
        objective=objective,
        optimizer=optimizer,
        scaler=scaler,
        update=update,
        loader=loader,
        eval_loader=job.eval_loader(),
        store=store,
        position=position,
        meter=meter,
        status=status,
        context=context,
        timer=timer,
        copies=copies,
        damaged=damaged,
    )


def _timer(run: Run, world: World) -> Timer:
    timer = timer_for(world.device, run.log.breakdown, run.log.comms)
    if timer is OFF and world.device.type == "cuda" and world.size > 1:
        return SampledTimer(world.device)  # detects slow ranks
    return timer


def _write_assembly(output: Path, steps: list[str]) -> None:
    """Writes what each step of the assembly did to assembly.log."""
    logs = logs_of(output)
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "assembly.log").write_text("".join(f"{line}\n" for line in steps))


def _check_model(
    job: ResolvedRun, unsharded: CallsWhole, context: ParallelContext, say: Callable[[str], None]
) -> bool:
    """Checks the built model against its own definition.

    Returns whether packed rows come with document boundaries.
    """
    run = job.run
    vocabulary = vocabulary_size(unsharded.model)
    bucket = requested_comm(run.parallel).bucket
    with explain_shard_access(bucket), as_written(run.compiled):
        documents = check_documents(unsharded, vocabulary, job, unsharded.device, say)
    if not (documents or run.recompute_attention):
        problem = (
            "keeps what our own attention made, but this model's or this objective's is another"
        )
        raise UserError("advanced.memory.recompute_attention", False, problem, "leave it out")
    if not run.recompute_attention:
        say("attention of recomputed blocks is kept, in rows that are one document")
    if context.context is not None:
        check_divided_rows(context.context, bool(run.data.packing), say)
    return documents


def _memory_checkpoints(
    run: Run, world: World, root: Path
) -> MemoryCheckpoints | NoMemoryCheckpoints:
    if world.copies is None:
        return NoMemoryCheckpoints()
    return MemoryCheckpoints(root, world.copies, afresh=run.resume != "auto")


def _resume(
    job: ResolvedRun,
    world: World,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    start: Start,
    say: Callable[[str], None],
) -> Position:
    """The position to train from; loads parameters and optimizer states from a checkpoint."""
    if start.folder is None:
        return Position()
    position = restore(
        start.folder, sharded, optimizer, job.data.fingerprint, world.checkpoint, start.reader
    )
    for line in damage_warnings(start, position.step):
        say(line)
    return position


def _report_start(
    job: ResolvedRun,
    start: Start,
    position: Position,
    copies: MemoryCheckpoints | NoMemoryCheckpoints,
    say: Callable[[str], None],
) -> None:
    """Reports where a resumed run continues, and which settings have changed."""
    folder = start.folder
    run = job.run
    if folder is None:
        return
    last = job.last_step(position.step, position.sequences)
    if position.step < last:
        place = start.place or f"{folder} (step {position.step})"
        say(f"going on from {place}{copies.lost_note(position.step)}")
        for change in changed_settings(folder, run):
            say(f"changed since then: {change}")
        return
    end = f"train.steps is {last}"
    if job.epochs is not None:
        end = f"train.epochs is {run.train.epochs:g}"
    say(f"nothing is left to train: {folder} is at step {position.step}, {end}")


def check_divided_rows(context: Context, packing: bool, say: Callable[[str], None]) -> None:
    """Rejects packed rows if the model cannot shard them; reports modules that need full rows."""
    support = context.support
    context.check_packing(packing)
    if support.whole:
        names = ", ".join(sorted(support.whole))
        say(f"context: {names} mix positions by their own code and get whole rows on every rank")


def _meter(
    job: ResolvedRun,
    world: World,
    sharded: ShardedModel,
    position: Position,
    sources: list[str],
    figures: tuple[str, ...],
) -> Meter:
    config = job.source.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", None) or len(find_blocks(sharded.model))
    model: Any = sharded.model
    width = getattr(config, "hidden_size", None) or model.get_input_embeddings().weight.shape[-1]
    flops = flops_per_token(
        job.parameters,
        sharded.embedding_only_numel,
        layers,
        width,
        job.run.data.sequence_length,
        job.adapted.frozen,
        stacks=2 if config.is_encoder_decoder else 1,
        causal=job.source.task == "causal",
    )
    peak = None
    if world.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(world.device), job.run.precision)
    work = Work(flops, peak * world.size if peak else None)
    total = job.last_step(position.step, position.sequences)
    return Meter(world.control, world.device, total, position.seconds, work, sources, figures)
