"""From job to the loop's parts, in one visible order: build → recompute → shard → fill → check → optimizer → resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._composable import checkpoint as recompute  # type: ignore[attr-defined]

from shardwise.checkpoint.store import CheckpointStore, choose_checkpoint, set_aside
from shardwise.data.loader import Loader
from shardwise.models.build import build_on_meta, fill_random, find_blocks, materialise
from shardwise.models.weights import load_weights
from shardwise.observe.hardware import flops_per_token, peak_flops
from shardwise.optim.adamw import build_optimizer
from shardwise.optim.scaler import LossScaler
from shardwise.parallel.mesh import World
from shardwise.train.describe import changed_settings
from shardwise.train.job import Job
from shardwise.train.meter import Meter
from shardwise.train.objective import CausalObjective, Objective
from shardwise.train.selfcheck import check_model
from shardwise.train.state import Position, restore
from shardwise.train.status import Status
from shardwise.zero.stages import ShardedModel, shard_model


@dataclass
class Parts:
    """Everything the loop uses."""

    job: Job
    world: World
    sharded: ShardedModel
    objective: Objective
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    loader: Loader
    eval_loader: Loader | None
    store: CheckpointStore
    position: Position
    meter: Meter
    status: Status


def build_model(job: Job, world: World) -> ShardedModel:
    """The model, sharded and filled; at stage 3 no rank ever holds it whole."""
    run, source = job.run, job.source
    model = build_on_meta(source)
    blocks = find_blocks(model)
    if run.recompute == "full":
        for _, block in blocks:
            recompute(block)
    shard_model(model, blocks, world.mesh, run.parallel.zero, run.precision)
    materialise(model, world.device)
    if source.weights is not None:
        load_weights(model, source.weights)
    else:
        fill_random(model, source, run.train.seed)
    model.train()
    return ShardedModel(model, run.parallel.zero, world.mesh)


def build_parts(job: Job, world: World, status: Status, say: Callable[[str], None] = lambda _: None) -> Parts:
    """Builds, checks and, where there is a checkpoint, resumes."""
    run = job.run
    status.set("loading the model")
    sharded = build_model(job, world)
    model: Any = sharded.model
    status.set("checking the model")
    vocabulary = model.get_input_embeddings().num_embeddings
    check_model(sharded, vocabulary, run.data.packing, job.source.label, world.device)
    optimizer = build_optimizer(sharded.parameters, run.train)
    scaler = LossScaler(world.device.type, run.loss_scale, enabled=run.precision == "fp16")
    root = job.output / "checkpoints"
    if run.resume == "never" and world.is_main:
        set_aside(job.output)
    store = CheckpointStore(root, run.checkpoint.keep, run.checkpoint.background, world.checkpoint)
    position = Position()
    if (folder := choose_checkpoint(run.resume, root)) is not None:
        status.set("resuming")
        position = restore(folder, sharded, optimizer, job.data.fingerprint, world.control, world.checkpoint)
        if position.scaler:
            scaler.load_state_dict(position.scaler)
        steps = run.train.steps or 0
        if position.step < steps:
            say(f"going on from {folder} (step {position.step})")
            for change in changed_settings(folder, run):
                say(f"changed since then: {change}")
        else:
            say(f"nothing is left to train: {folder} is at step {position.step}, train.steps is {steps}")
    meter = _meter(job, world, model, position)
    return Parts(
        job, world, sharded, CausalObjective(model), optimizer, scaler, job.loader(), job.eval_loader(), store,
        position, meter, status,
    )  # fmt: skip


def _meter(job: Job, world: World, model: Any, position: Position) -> Meter:
    config = model.config.get_text_config()
    tied = (
        model.get_output_embeddings() is not None
        and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    lookup = 0 if tied else model.get_input_embeddings().weight.numel()
    work = flops_per_token(
        job.parameters, lookup, config.num_hidden_layers, config.hidden_size, job.run.data.sequence_length
    )
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peak = peak_flops(name, job.run.precision) if name else None
    assert job.run.train.steps is not None
    total_peak = peak * world.size if peak else None
    return Meter(world.control, world.device, job.run.train.steps, position.seconds, work, total_peak)
