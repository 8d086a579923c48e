"""The one assembly: a model becomes what trains, by small steps in one visible order (`STEPS`).

Training, `initialize`, rehearsals, `bench`, `verify`, the start-up trial and second models (teacher, reference) all
call `parallelize`, so that what is tried, rehearsed and proven is what trains. A model is best on `meta`: at stage 3
no rank ever holds the full model. What a model's parts are is found on a tiny model of its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.config.schema import Run
from shardwise.core.compat.torch_private import checkpoint as recompute
from shardwise.core.dtypes import COMPUTE
from shardwise.core.effective_device import compiled
from shardwise.distributed.mesh import World
from shardwise.nn.adapters.apply import Adapted, apply_method
from shardwise.nn.adapters.layers import multiply_bases_in_float8
from shardwise.nn.float8_linear import use_float8
from shardwise.nn.models.build import find_blocks, materialise
from shardwise.nn.models.source import ModelSource
from shardwise.nn.moe.grouped_experts import use_grouped_experts
from shardwise.nn.tiled_mlp import tile_blocks
from shardwise.nn.tiny.case import CannotParallelize, TinyCase, tiny_case
from shardwise.observe.breakdown import OFF, Timer
from shardwise.parallel.activations.block_inputs import BlockInputs
from shardwise.parallel.activations.recompute_groups import save_inputs_by_group
from shardwise.parallel.activations.saved_attention import SavedAttention
from shardwise.parallel.context.install import install_context
from shardwise.parallel.expert.apply import count_loads, spread_experts
from shardwise.parallel.offload.parameters import stub_out
from shardwise.parallel.offload.pinned_memory import return_freed_memory
from shardwise.parallel.offload.policy import float8_gathers, is_unsharded, split_in, store_in_bf16
from shardwise.parallel.parallel_context import ParallelContext
from shardwise.parallel.pipeline import Pipeline, Stages, cut_model, probe
from shardwise.parallel.pipeline.cut import sizes_of
from shardwise.parallel.pipeline.schedule import schedule_of
from shardwise.parallel.routers.install import install_routers
from shardwise.parallel.tensor.apply import divide_tensor
from shardwise.parallel.tensor.roles import find_roles
from shardwise.parallel.zero.overlap import CommSettings, install_overlap, requested_comm
from shardwise.parallel.zero.plusplus import install_collectives
from shardwise.parallel.zero.stages import (
    ShardedModel,
    ShardOptions,
    shard_experts,
    shard_model,
)

Blocks = list[tuple[str, nn.Module]]
Materialise = Callable[[Any, torch.device], None]
ChooseComm = Callable[[Any, Blocks], CommSettings]


class AxisRefused(CannotParallelize):
    """A model cannot be parallelised along an axis, which is named."""

    def __init__(self, axis: str, refusal: CannotParallelize) -> None:
        super().__init__(refusal.module, refusal.why)
        self.axis = axis


@dataclass
class Assembly:
    """A model on its way to what trains: the settings, and what the steps so far have made of it."""

    model: Any
    run: Run
    world: World
    source: ModelSource | None = (
        None  # None: a model of a user's own loop, whose class is not known
    )
    timer: Timer = OFF
    materialise: Materialise = materialise
    choose_comm: ChooseComm | None = None

    blocks: Blocks = field(default_factory=list)
    context: ParallelContext = field(init=False)
    adapted: Adapted | None = None
    lookup: int = 0
    saved_attention: SavedAttention | None = None
    comm: CommSettings = field(init=False)
    sharded: ShardedModel = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = find_blocks(self.model)
        self.context = ParallelContext(self.world)
        self.comm = requested_comm(self.run.parallel)

    @cached_property
    def case(self) -> TinyCase:
        """Makes tiny models of the same class."""
        assert self.source is not None
        return tiny_case(self.source)

    @property
    def trains(self) -> bool:
        """Whether anything is trained: not of a teacher or a reference."""
        return any(parameter.requires_grad for parameter in self.model.parameters())

    @property
    def compute(self) -> torch.dtype | None:
        """What parameters are computed in, if not as they are stored."""
        return None if self.run.precision == "fp32" else COMPUTE[self.run.precision]


Step = Callable[[Assembly], str | None]


def parallelize(
    model: Any,
    run: Run,
    world: World,
    source: ModelSource | None = None,
    timer: Timer = OFF,
    materialise: Materialise = materialise,
    choose_comm: ChooseComm | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[ShardedModel, ParallelContext]:
    """Turns a model into what trains on this rank, with memory but, if it was on `meta`, no values yet.

    `source` makes tiny models of the class; without it the model is sharded by ZeRO alone. `materialise` gives memory
    to the shards. `choose_comm` decides how parameters travel, else the settings do. `say` gets one line a step.
    """
    assembly = Assembly(model, run, world, source, timer, materialise, choose_comm)
    for step in STEPS:
        if (line := step(assembly)) is not None:
            say(f"{step.__name__.replace('_', ' ')}: {line}")
    return assembly.sharded, assembly.context


def add_adapters(a: Assembly) -> str | None:
    """Puts adapters on and freezes the rest, which is stored in the compute type."""
    if a.source is None:
        return None
    a.adapted = apply_method(a.model, a.run, a.source.weights)
    a.blocks = find_blocks(a.model)
    a.lookup = embedding_only_parameters(a.model)
    if a.adapted.plan is None:
        return None
    return f"{a.run.method.type} on {len(a.adapted.plan.targets)} modules"


def split_master_weights(a: Assembly) -> str | None:
    """Stores parameters in bf16 where the low halves of their fp32 masters are among the optimizer's states."""
    if a.source is None or not split_in(a.run):
        return None
    store_in_bf16(a.model)
    return "parameters in bf16"


def use_fp8_linears(a: Assembly) -> str | None:
    """Lets linear layers of blocks multiply in fp8."""
    layers = use_float8(a.model, a.blocks, a.run.fp8)
    return f"{len(layers)} layers, {a.run.fp8.recipe}" if layers else None


def group_experts(a: Assembly) -> str | None:
    """Computes all experts of a layer by two grouped products."""
    if a.source is None or a.run.experts != "auto":
        return None
    use_grouped_experts(a.model)
    return None


def multiply_frozen_bases_in_fp8(a: Assembly) -> str | None:
    """Lets bases of adapters that are stored in few bits multiply in fp8."""
    if a.source is not None and a.run.parallel.tensor == 1:
        multiply_bases_in_float8(a.model, a.world.device, getattr(a.run.method, "multiply", "auto"))
    return None


def shard_experts_over_ranks(a: Assembly) -> str | None:
    """Expert parallelism: each rank of a group holds its share of every layer's experts."""
    if a.run.parallel.beyond_data:
        a.context.tiny = replace(a.case, dtype=torch.float32).model()
    if a.world.expert is None:
        return None
    try:
        a.context.experts = spread_experts(a.model, a.world.expert)
    except CannotParallelize as refusal:
        raise AxisRefused("expert", refusal) from None
    return f"{len(a.context.experts.named)} layers over {a.world.expert.size()} ranks"


def cut_into_stages(a: Assembly) -> str | None:
    """Pipeline parallelism: the model's own forward runs on every stage, with parameters for its blocks alone."""
    mesh = a.world.pipeline
    if mesh is None:
        return None
    try:
        schedule = schedule_of(a.run.parallel)
        cut = cut_model(
            a.model, probe(a.case), mesh.size() * schedule.chunks, block_weights(a.model)
        )
        a.context.stages = Stages(
            a.model, cut, mesh.get_local_rank(), mesh.size(), schedule, a.compute
        )
    except CannotParallelize as refusal:
        raise AxisRefused("pipeline", refusal) from None
    a.blocks = a.context.stages.blocks
    if (experts := a.context.experts) is not None:  # others are on other stages
        mine = {
            name: module
            for name, module in experts.named.items()
            if any(True for _ in module.parameters())
        }
        a.context.experts = replace(experts, named=mine)
    return f"{len(a.blocks)} blocks on this stage, {schedule.style}"


def shard_tensors(a: Assembly) -> str | None:
    """Tensor and sequence parallelism."""
    if a.world.tensor is None:
        return None
    try:
        a.context.tensor = divide_tensor(a.model, find_roles(a.case.model()), a.world.tensor)
    except CannotParallelize as refusal:
        raise AxisRefused("tensor", refusal) from None
    return f"over {a.world.tensor.size()} ranks"


def shard_sequences(a: Assembly) -> str | None:
    """Context parallelism: each rank holds a part of every row."""
    if a.world.context is None:
        return None
    try:
        a.context.context = install_context(a.model, a.world.context, a.run.parallel.context_kind)
    except CannotParallelize as refusal:
        raise AxisRefused("context", refusal) from None
    return f"{a.run.parallel.context_kind} over {a.world.context.size()} ranks"


def build_pipeline(a: Assembly) -> str | None:
    """What runs the stages by their schedule."""
    if a.context.stages is None:
        return None
    assert a.world.pipeline is not None
    meshes = () if a.world.tensor is None else (a.world.tensor,)
    schedule = schedule_of(a.run.parallel)
    a.context.pipeline = Pipeline(
        a.context.stages, a.world.pipeline.get_group(), schedule, a.world.device, meshes
    )
    a.context.pipeline.record = a.run.log.breakdown
    return None


def tile_mlps(a: Assembly) -> str | None:
    """Computes the parts of blocks that look at one token at a time some tokens at a time."""
    if a.run.tiled_mlp is None:
        return None
    small = a.case.model().float()
    tile_blocks(a.model, a.blocks, small, a.case.inputs(), a.run.tiled_mlp, a.run.compiled)
    return f"{a.run.tiled_mlp} tokens at a time"


def add_router_losses(a: Assembly) -> str | None:
    """Counts tokens by expert; adds the losses of routers and updates their biases as the settings say."""
    if a.source is None or not a.trains:
        return None
    context = a.context
    context.loads = (
        context.experts.loads
        if context.experts is not None
        else count_loads(a.model, a.world.device)
    )
    context.routing = install_routers(a.model, a.source, a.run, context.loads, a.world)
    if context.stages is not None and context.routing is not None:
        context.stages.carried = context.routing.losses
    return None if context.routing is None else "loads counted, losses added"


def recompute_activations(a: Assembly) -> str | None:
    """Activation checkpointing: of blocks only inputs are saved (here or on the host), and what attention made."""
    if a.run.recompute != "full":
        return None
    blocks = a.blocks[: a.run.recompute_blocks]
    inputs = (
        BlockInputs(None, host=True, timer=a.timer) if a.run.offload.activations == "cpu" else None
    )
    offloaded = len(blocks[: a.run.offload.activation_blocks]) if inputs is not None else 0
    saved = None if a.run.recompute_attention else SavedAttention()
    for number, (_, block) in enumerate(blocks):
        around = {}
        if saved is not None:
            around["context_fn"] = saved.around(block, inputs if number < offloaded else None)
        recompute(block, **around)
    if inputs is not None:
        inputs.attach(blocks[: offloaded : a.run.recompute_group])
    if a.run.recompute_group > 1:
        save_inputs_by_group(blocks, a.run.recompute_group, inputs, saved)
    a.saved_attention = saved
    return f"{len(blocks)} blocks"


def compile_blocks(a: Assembly) -> str | None:
    """Compiles each block, inside of the hooks of sharding and recomputation."""
    if not a.run.compiled:
        return None
    failures: list[str] = []
    for _, block in a.blocks:
        block.forward = compiled(block.forward, a.run.recompute == "light", failures)
    return f"{len(a.blocks)} blocks"


def fully_shard_experts(a: Assembly) -> str | None:
    """Shards experts among the ranks that hold the same ones."""
    if a.context.experts is None:
        return None
    shard_experts(
        a.context.experts,
        a.world,
        a.run.parallel.zero,
        a.run.precision,
        a.run.parallel.reduce_dtype,
    )
    return None


def fully_shard_blocks(a: Assembly) -> str | None:
    """ZeRO on FSDP2: blocks (or what fits a bucket), then the rest."""
    if a.choose_comm is not None:
        a.comm = a.choose_comm(a.model, a.blocks)
    options = ShardOptions(
        a.comm.bucket,
        a.comm.together,
        is_unsharded(a.run, a.world),
        a.run.parallel.reduce_dtype,
    )
    shard_model(a.model, a.blocks, a.world.mesh, a.run.parallel.zero, a.run.precision, options)
    replicas, shards = a.world.mesh.size(0), a.world.mesh.size(1)
    return f"ZeRO-{a.run.parallel.zero} over {shards} ranks, {replicas} replicas, {a.run.precision}"


def give_memory(a: Assembly) -> str | None:
    """Memory for the shards, or a place off the device."""
    if a.source is None or a.run.offload.parameters == "none":
        a.materialise(a.model, a.world.device)
        return None
    stub_out(a.model, a.world.device)
    if a.world.device.type == "cpu":
        return_freed_memory()
    return f"parameters on {a.run.offload.parameters}"


def take_parameters(a: Assembly) -> str | None:
    """The sharded model: which parameters are trained, saved and counted."""
    a.sharded = ShardedModel(a.model, a.run.parallel.zero, a.world.mesh)
    a.sharded.kept = None if a.adapted is None else a.adapted.kept
    a.sharded.lookup = a.lookup
    a.sharded.timer = a.timer
    if a.saved_attention is not None:
        a.sharded.idle = a.saved_attention.idle
    if a.run.parallel.beyond_data:
        a.context.take(a.sharded)
    return None


def install_communication(a: Assembly) -> str | None:
    """ZeRO++'s collectives, gathers ahead, and reductions beside computing."""
    if not a.trains:
        return None
    parallel = a.run.parallel
    install_collectives(
        a.sharded, parallel, a.world, a.run.timeout, float8_gathers(a.run, a.world.mesh.size(1))
    )
    install_overlap(a.sharded, a.comm.prefetch, not parallel.quantize_gradients, a.timer.on)
    return None if a.comm.prefetch is None else f"{a.comm.prefetch} units prefetched"


STEPS: tuple[Step, ...] = (
    add_adapters,
    split_master_weights,
    use_fp8_linears,
    group_experts,
    multiply_frozen_bases_in_fp8,
    shard_experts_over_ranks,
    cut_into_stages,
    shard_tensors,
    shard_sequences,
    build_pipeline,
    tile_mlps,
    add_router_losses,
    recompute_activations,
    compile_blocks,
    fully_shard_experts,
    fully_shard_blocks,
    give_memory,
    take_parameters,
    install_communication,
)


def embedding_only_parameters(model: Any) -> int:
    """Parameters of the input embedding, unless it is the head as well: a token costs no arithmetic there."""
    inner = model.get_input_embeddings()
    outer = model.get_output_embeddings()
    return 0 if outer is not None and outer.weight is inner.weight else int(inner.weight.numel())


def block_weights(model: Any) -> dict[str, float]:
    """What each block costs, by its parameters. The head goes with the last block."""
    weights = sizes_of(model)
    head = model.get_output_embeddings()
    if weights and head is not None:
        weights[list(weights)[-1]] += head.weight.numel()
    return weights
