"""From job to the loop's parts, in one visible order.

build → adapters → fp8 → experts → pipeline → tensor → context → recompute → activations → compile → shard → optimizer
→ fill → check → resume
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed._composable import checkpoint as recompute  # type: ignore[attr-defined]

from shardwise.checkpoint.copies import MemoryCheckpoints, NoMemoryCheckpoints
from shardwise.checkpoint.store import CheckpointStore, set_aside
from shardwise.config.methods import Full
from shardwise.config.schema import Run
from shardwise.core.dtypes import COMPUTE
from shardwise.core.effective_device import as_written, compiled
from shardwise.core.errors import UserError
from shardwise.core.hardware.flops import flops_per_token, peak_flops
from shardwise.data.loader import Loader
from shardwise.distributed.lazy_rows import Rows
from shardwise.distributed.mesh import World
from shardwise.nn.adapters.apply import apply_method
from shardwise.nn.adapters.fill import fill_adapters
from shardwise.nn.adapters.layers import multiply_bases_in_float8
from shardwise.nn.float8_linear import use_float8
from shardwise.nn.models.build import build_on_meta, fill_random, find_blocks, materialise, vocabulary_size
from shardwise.nn.models.weights import load_weights, new_parameters
from shardwise.nn.moe.grouped_experts import use_grouped_experts
from shardwise.nn.objective import Objective
from shardwise.nn.tiled_mlp import tile_blocks
from shardwise.nn.tiny.case import tiny_case
from shardwise.objectives.make import make_objective
from shardwise.observe.breakdown import OFF, Timer, timer_for
from shardwise.observe.pace import SampledTimer
from shardwise.optim import build
from shardwise.optim.scaler import LossScaler
from shardwise.parallel.activations.block_inputs import BlockInputs
from shardwise.parallel.activations.recompute_groups import keep_one_of
from shardwise.parallel.activations.saved_attention import SavedAttention
from shardwise.parallel.context.install import Context
from shardwise.parallel.expert.apply import count_loads
from shardwise.parallel.offload.checkpoint_entries import masters
from shardwise.parallel.offload.disk import DiskFolder
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.offload.parameters import stub_out
from shardwise.parallel.offload.pinned_memory import return_freed_memory
from shardwise.parallel.offload.policy import (
    eager_share,
    float8_gathers,
    keeps_whole,
    offload_optimizer,
    split_in,
    store_in_bf16,
)
from shardwise.parallel.parallel_context import ParallelContext
from shardwise.parallel.routers.install import install_routers
from shardwise.parallel.selfcheck import CallsWhole, UnshardedModel, check_documents
from shardwise.parallel.zero.overlap import CommSettings, given, install_overlap
from shardwise.parallel.zero.plusplus import install_collectives
from shardwise.parallel.zero.stages import ShardedModel, shard_experts, shard_model
from shardwise.parallel.zero.timed_collectives import watch_collectives
from shardwise.parallel.zero.tuning import tune
from shardwise.parallel.zero.units import explain_divided
from shardwise.parallel.zero.update import Update
from shardwise.resolved_run import ResolvedRun
from shardwise.train.describe import changed_settings
from shardwise.train.meter import Meter
from shardwise.train.resume import find_start, records, told
from shardwise.train.state import Position, restore
from shardwise.train.status import Status


@dataclass
class TrainState:
    """Everything the loop uses."""

    job: ResolvedRun
    world: World
    sharded: ShardedModel
    objective: Objective
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    update: Update
    loader: Loader
    eval_loader: Loader | None
    store: CheckpointStore
    position: Position
    meter: Meter
    status: Status
    spread: ParallelContext
    timer: Timer = OFF
    copies: MemoryCheckpoints | NoMemoryCheckpoints = field(default_factory=NoMemoryCheckpoints)
    damaged: list[dict[str, Any]] = field(default_factory=list)  # checkpoints that were put aside, as records


def build_model(
    job: ResolvedRun,
    world: World,
    timer: Timer = OFF,
    give_memory: Callable[[Any, torch.device], None] = materialise,
    choose: Callable[[Any, list[tuple[str, Any]]], CommSettings] | None = None,
) -> tuple[ShardedModel, ParallelContext]:
    """The model, sharded, with memory but no values yet; at stage 3 no rank ever holds it whole.

    `choose`: how a model of such blocks travels; else as the run says.
    """
    run, source = job.run, job.source
    model = build_on_meta(source)
    adapted = apply_method(model, run, source.weights)
    if split_in(run):
        store_in_bf16(model)
    blocks, lookup, spread = find_blocks(model), only_looked_up(model), ParallelContext(world)
    use_float8(model, blocks, run.fp8)
    if run.experts == "auto":
        use_grouped_experts(model)
    if run.parallel.tensor == 1:
        multiply_bases_in_float8(model, world.device, getattr(run.method, "multiply", "auto"))
    if run.parallel.beyond_data:
        from shardwise.parallel.apply import divide

        compute = None if run.precision == "fp32" else COMPUTE[run.precision]
        spread, blocks = divide(model, blocks, tiny_case(source), run.parallel, world, compute)
        if spread.pipeline is not None:
            spread.pipeline.record = run.log.breakdown
    if run.tile is not None:
        case = tiny_case(source)
        small = case.model().float()
        tile_blocks(model, blocks, small, case.inputs(), run.tile, run.compiled)
    spread.loads = spread.experts.loads if spread.experts is not None else count_loads(model, world.device)
    spread.routing = install_routers(model, source, run, spread.loads, world)
    if spread.stages is not None and spread.routing is not None:
        spread.stages.carried = spread.routing.losses
    kept = recompute_blocks(run, blocks[: run.recompute_blocks], timer) if run.recompute == "full" else None
    if run.compiled:
        failures: list[str] = []
        for _, block in blocks:  # inside of the hooks of sharding and recomputation
            block.forward = compiled(block.forward, run.recompute == "light", failures)
    if spread.experts is not None:
        shard_experts(spread.experts, world, run.parallel.zero, run.precision, run.parallel.reduce)
    whole, sending = keeps_whole(run, world), choose(model, blocks) if choose else given(run.parallel)
    shard_model(
        model, blocks, world.mesh, run.parallel.zero, run.precision, sending.bucket, whole, sending.together,
        run.parallel.reduce,
    )  # fmt: skip
    if run.offload.parameters == "none":
        give_memory(model, world.device)
    else:
        stub_out(model, world.device)
        if world.device.type == "cpu":
            return_freed_memory()
    model.train()
    sharded = ShardedModel(model, run.parallel.zero, world.mesh)
    sharded.kept, sharded.lookup, sharded.timer = adapted.kept, lookup, timer
    sharded.idle = kept.idle if kept is not None else list
    if run.parallel.beyond_data:
        spread.take(sharded)
    install_collectives(sharded, run.parallel, world, run.timeout, float8_gathers(run, world.mesh.size(1)))
    install_overlap(sharded, sending.prefetch, not run.parallel.quantize_gradients, timer.on)
    return sharded, spread


def recompute_blocks(run: Run, blocks: list[tuple[str, Any]], timer: Timer) -> SavedAttention | None:
    """Keeps of blocks what the run says: inputs, or one in several, and what attention made; here or on the host."""
    inputs = BlockInputs(None, host=True, timer=timer) if run.offload.activations == "cpu" else None
    leaving = len(blocks[: run.offload.activation_blocks]) if inputs is not None else 0
    kept = None if run.recompute_attention else SavedAttention()
    for number, (_, block) in enumerate(blocks):
        around = {} if kept is None else {"context_fn": kept.around(block, inputs if number < leaving else None)}
        recompute(block, **around)
    if inputs is not None:
        inputs.attach(blocks[: leaving : run.recompute_group])
    if run.recompute_group > 1:
        keep_one_of(blocks, run.recompute_group, inputs, kept)
    return kept


def only_looked_up(model: Any) -> int:
    """Parameters of the input embedding, where it is no head as well: a token costs no arithmetic there."""
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    return 0 if outer is not None and outer.weight is inner.weight else int(inner.weight.numel())


def fill_model(job: ResolvedRun, sharded: ShardedModel, through: Mapping[str, Rows]) -> None:
    """The model's first values, from its files or fresh; those of split parameters go through their masters."""
    if job.source.weights is not None:
        load_weights(sharded.model, job.source.weights, through)
        if new := new_parameters(sharded.model, job.source.weights):
            fill_random(sharded.model, job.source, job.run.train.seed, through, new)
    else:
        fill_random(sharded.model, job.source, job.run.train.seed, through)
    if not isinstance(job.run.method, Full):
        fill_adapters(sharded, job.run.train.seed, job.run.method.adapter, through)


def build_optimizer(
    job: ResolvedRun, world: World, sharded: ShardedModel, disk: DiskFolder, say: Callable[[str], None] = lambda _: None
) -> torch.optim.Optimizer:
    """The optimizer over the sharded parameters, its states where the run wants them."""
    run = job.run
    if run.offload.optimizer == "none" and not split_in(run):
        return build.build_optimizer(sharded.parameters, run.train, sharded.model)
    return offload_optimizer(run, sharded, world.device, disk, say)


def build_parts(
    job: ResolvedRun,
    world: World,
    status: Status,
    say: Callable[[str], None] = lambda _: None,
    disk: DiskFolder | None = None,
) -> TrainState:
    """Builds, checks and, where there is a checkpoint, resumes; files in `disk` are the caller's to remove."""
    run = job.run
    disk = disk or DiskFolder(job.offload_folder, world.rank, world.size)
    status.set("loading the model")
    timer = timer_for(world.device, run.log.breakdown, run.log.comms)
    if timer is OFF and world.device.type == "cuda" and world.size > 1:
        timer = SampledTimer(world.device)  # for the alarm of slow ranks
    choose = partial(tune, run, world, say=say, output=job.output)
    sharded, spread = build_model(job, world, timer, choose=choose)
    optimizer = build_optimizer(job, world, sharded, disk, say)
    fill_model(job, sharded, masters(optimizer, sharded.model) if isinstance(optimizer, OffloadedOptimizer) else {})
    model: Any = sharded.model
    status.set("checking the model")
    asked: CallsWhole = sharded if spread.tiny is None else UnshardedModel(spread.tiny)
    vocabulary = vocabulary_size(asked.model)
    with explain_divided(given(run.parallel).bucket), as_written(run.compiled):
        apart = check_documents(asked, vocabulary, job, asked.device, say)
    if not (apart or run.recompute_attention):
        problem = "keeps what our own attention made, but this model's or this objective's is another"
        raise UserError("recompute_attention", False, problem, "leave it out")
    if not run.recompute_attention:
        say("attention of recomputed blocks is kept, in rows that are one document")
    if spread.context is not None:
        check_divided_rows(spread.context, bool(run.data.packing), say)
    scaler = LossScaler(world.device.type, run.loss_scale, enabled=run.precision == "fp16")
    root = job.output / "checkpoints"
    copies = (
        MemoryCheckpoints(root, world.copies, afresh=run.resume != "auto")
        if world.copies is not None
        else NoMemoryCheckpoints()
    )
    if run.resume == "never" and world.is_main:
        set_aside(job.output)
    store = CheckpointStore(root, run.checkpoint.keep, run.checkpoint.background, world.checkpoint)
    position = Position()
    status.set("resuming")
    start = find_start(run.resume, root, copies, world.control)
    folder, place, damaged = start.folder, start.place, list[dict[str, Any]]()
    if folder is not None:
        position = restore(folder, sharded, optimizer, job.data.fingerprint, world.checkpoint, start.reader)
        damaged = records(start, position.step)
        for line in told(start, position.step):
            say(line)
        if position.scaler:
            scaler.load_state_dict(position.scaler)
        steps = job.last_step(position.step, position.sequences)
        if position.step < steps:
            say(f"going on from {place or f'{folder} (step {position.step})'}{copies.lost_note(position.step)}")
            for change in changed_settings(folder, run):
                say(f"changed since then: {change}")
        else:
            end = f"train.steps is {steps}" if job.epochs is None else f"train.epochs is {run.train.epochs:g}"
            say(f"nothing is left to train: {folder} is at step {position.step}, {end}")
    copies.began(position.step)
    accumulates = run.train.batch_size > int(run.train.micro_batch_size) * world.layout.data

    def settle() -> None:
        store.settle()
        copies.settle()

    update = Update(
        sharded, optimizer, scaler, run.train.clip, eager_share(run), accumulates, settle, spread.after_step
    )  # fmt: skip
    loader = job.loader()
    with as_written(run.compiled):
        objective = make_objective(job, world, sharded, apart, asked, say, spread.router_losses)
    meter = _meter(job, world, sharded, position, loader.names, objective.figures)
    watch_collectives(model, timer)  # last, around whatever the parts above put in the place of FSDP's own
    return TrainState(
        job, world, sharded, objective, optimizer, scaler, update, loader, job.eval_loader(), store,
        position, meter, status, spread, timer, copies, damaged,
    )  # fmt: skip


def check_divided_rows(context: Context, packing: bool, say: Callable[[str], None]) -> None:
    """Refuses packed rows where the model cannot have them divided; tells what is computed on whole ones."""
    found = context.findings
    if packing and not found.packed:
        problem = f"packed documents cannot be divided over ranks by this model ({found.trouble})"
        raise UserError("data.packing", True, problem, "set data.packing: false, or parallel.context: 1")
    if found.whole:
        named = ", ".join(sorted(found.whole))
        say(f"context: {named} mix positions by their own code and get whole rows on every rank")


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
    work = flops_per_token(
        job.parameters, sharded.lookup, layers, width, job.run.data.sequence_length,
        job.adapted.frozen, stacks=2 if config.is_encoder_decoder else 1, causal=job.source.task == "causal",
    )  # fmt: skip
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peak = peak_flops(name, job.run.precision) if name else None
    total, total_peak = job.last_step(position.step, position.sequences), peak * world.size if peak else None
    return Meter(world.control, world.device, total, position.seconds, work, total_peak, sources, figures)
