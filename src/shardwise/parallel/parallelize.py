"""The one assembly: parallelizes a model by small steps in one visible order (`STEPS`).

Training, `initialize`, rehearsals, `bench`, `verify`, the start-up trial, the zoo and second models
(teacher, reference) all call `parallelize`, so what is tried, rehearsed and proven is what trains.
Models are best built on `meta`: at stage 3 no rank ever holds the full model. The roles of a
model's parts are determined on a tiny model of its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config.schema import Run
from shardwise.core.compat.torch_private import checkpoint as recompute
from shardwise.core.dtypes import COMPUTE
from shardwise.core.effective_device import compiled
from shardwise.core.printable import counted
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
from shardwise.parallel.context.install import apply_context_parallel
from shardwise.parallel.expert.apply import apply_expert_parallel, count_loads
from shardwise.parallel.expert.load_counts import ExpertLoads
from shardwise.parallel.offload.parameters import stub_out
from shardwise.parallel.offload.pinned_memory import return_freed_memory
from shardwise.parallel.offload.policy import float8_gathers, is_unsharded, split_in, store_in_bf16
from shardwise.parallel.parallel_context import ParallelContext
from shardwise.parallel.pipeline import Pipeline, Stages, cut_model, probe
from shardwise.parallel.pipeline.cut import sizes_of
from shardwise.parallel.pipeline.schedule import schedule_of
from shardwise.parallel.routers.install import Routing, install_routers
from shardwise.parallel.tensor.apply import apply_tensor_parallel
from shardwise.parallel.tensor.local_trial import try_locally
from shardwise.parallel.tensor.roles import find_roles
from shardwise.parallel.zero.overlap import CommSettings, install_overlap, requested_comm
from shardwise.parallel.zero.plusplus import install_collectives
from shardwise.parallel.zero.stages import (
    ShardedModel,
    ShardOptions,
    shard_experts,
    shard_model,
)
from shardwise.parallel.zero.units import list_of

Blocks = list[tuple[str, nn.Module]]
Materialise = Callable[[Any, torch.device], None]
ChooseComm = Callable[[Any, Blocks], CommSettings]


class AxisRefused(CannotParallelize):
    """A model cannot be parallelized along `axis`."""

    def __init__(self, axis: str, refusal: CannotParallelize) -> None:
        super().__init__(refusal.module, refusal.why)
        self.axis = axis


@dataclass
class Assembly:
    """A model being parallelized: the settings, and the results of the steps so far."""

    model: Any
    run: Run
    world: World
    source: ModelSource | None = None  # None: the model of a custom loop
    like: ModelSource | None = None  # that of tiny models of the class, if it is not `source`
    timer: Timer = OFF
    materialise: Materialise = materialise
    choose_comm: ChooseComm | None = None

    blocks: Blocks = field(default_factory=list)
    context: ParallelContext = field(init=False)
    adapted: Adapted | None = None
    embedding_only_numel: int = 0
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
        source = self.source or self.like
        assert source is not None
        return tiny_case(source)

    @property
    def trains(self) -> bool:
        """Whether any parameter is trained: false for a teacher or a reference."""
        return any(parameter.requires_grad for parameter in self.model.parameters())

    @property
    def compute(self) -> torch.dtype | None:
        """The compute dtype, if it differs from the stored one."""
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
    like: ModelSource | None = None,
) -> tuple[ShardedModel, ParallelContext]:
    """The sharded model, with memory (but no values yet, if it was on `meta`), and its axes.

    `source` provides tiny models of the class; the model of a custom loop has only its class, of
    which `like` provides them: without it, only ZeRO is applied. `materialise` allocates the
    shards. `choose_comm` overrides the settings of how parameters are gathered. `say`
    gets one line per step that has something to report.
    """
    assembly = Assembly(model, run, world, source, like, timer, materialise, choose_comm)
    for step in STEPS:
        line = step(assembly)
        if line is not None:
            say(f"{step.__name__.replace('_', ' ')}: {line}")
    return assembly.sharded, assembly.context


def add_adapters(a: Assembly) -> str | None:
    """Adds adapters and freezes the rest, which is stored in the compute dtype."""
    if a.source is None:
        return None
    a.adapted = apply_method(a.model, a.run, a.source.weights)
    a.blocks = find_blocks(a.model)
    a.embedding_only_numel = embedding_only_parameters(a.model)
    if a.adapted.plan is None:
        return None
    return f"{a.run.method.type} on {counted(len(a.adapted.plan.targets), 'module', 'modules')}"


def split_master_weights(a: Assembly) -> str | None:
    """Stores parameters in bf16, the low halves of their fp32 masters with the optimizer."""
    if a.source is None or not split_in(a.run):
        return None
    store_in_bf16(a.model)
    return "bf16 + 16-bit remainder in the optimizer"


def use_fp8_linears(a: Assembly) -> str | None:
    """Multiplies in fp8 in the linear layers of blocks."""
    layers = use_float8(a.model, a.blocks, a.run.fp8)
    if not layers:
        return None
    return f"{counted(len(layers), 'layer', 'layers')}, {a.run.fp8.recipe}"


def group_experts(a: Assembly) -> str | None:
    """Computes all experts of a layer by two grouped matrix products."""
    if a.source is None or a.run.experts != "auto":
        return None
    layers = use_grouped_experts(a.model)
    return counted(len(layers), "layer", "layers") if layers else None


def multiply_frozen_bases_in_fp8(a: Assembly) -> str | None:
    """Multiplies in fp8 with quantized bases of adapters."""
    if a.source is None or a.run.parallel.tensor > 1:
        return None
    mode = getattr(a.run.method, "multiply", "auto")
    layers = multiply_bases_in_float8(a.model, a.world.device, mode)
    return counted(layers, "layer", "layers") if layers else None


def build_tiny_model(a: Assembly) -> str | None:
    """Builds a tiny fp32 model of the class, which stays unsharded, to examine its structure."""
    if a.source is not None and a.run.parallel.uses_model_parallelism:
        a.context.tiny = replace(a.case, dtype=torch.float32).model()
    return None


def use_expert_parallelism(a: Assembly) -> str | None:
    """Expert parallelism: each rank of a group holds a share of every layer's experts."""
    if a.world.expert is None:
        return None
    try:
        a.context.experts = apply_expert_parallel(a.model, a.world.expert)
    except CannotParallelize as refusal:
        raise AxisRefused("expert", refusal) from None
    layers = counted(len(a.context.experts.named), "layer", "layers")
    return f"{layers} over {a.world.expert.size()} ranks"


def cut_into_stages(a: Assembly) -> str | None:
    """Pipeline parallelism: each stage runs the model's forward with only its own blocks."""
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
        local = {
            name: module
            for name, module in experts.named.items()
            if next(module.parameters(), None) is not None
        }
        a.context.experts = replace(experts, named=local)
    return f"{counted(len(a.blocks), 'block', 'blocks')} on this stage"


def use_tensor_parallelism(a: Assembly) -> str | None:
    """Tensor and sequence parallelism."""
    if a.world.tensor is None:
        return None
    try:
        roles = find_roles(a.case.model())
        local = try_locally(a.case, roles)
        a.context.tensor = apply_tensor_parallel(a.model, roles, a.world.tensor, local=local)
    except CannotParallelize as refusal:
        raise AxisRefused("tensor", refusal) from None
    on_plain = sum(block in a.context.tensor.local for _, block in a.blocks)
    ranks = a.world.tensor.size()
    return f"over {ranks} ranks, {on_plain} of {len(a.blocks)} blocks on plain tensors"


def use_context_parallelism(a: Assembly) -> str | None:
    """Context parallelism: each rank holds a part of every row."""
    if a.world.context is None:
        return None
    try:
        a.context.context = apply_context_parallel(
            a.model, a.world.context, a.run.parallel.context_kind
        )
    except CannotParallelize as refusal:
        raise AxisRefused("context", refusal) from None
    return f"{a.run.parallel.context_kind} over {a.world.context.size()} ranks"


def build_pipeline(a: Assembly) -> str | None:
    """Creates the pipeline, which runs the stages by their schedule."""
    if a.context.stages is None:
        return None
    assert a.world.pipeline is not None
    meshes = () if a.world.tensor is None else (a.world.tensor,)
    schedule = schedule_of(a.run.parallel)
    a.context.pipeline = Pipeline(
        a.context.stages, a.world.pipeline.get_group(), schedule, a.world.device, meshes
    )
    a.context.pipeline.record = a.run.log.breakdown
    chunks = counted(schedule.chunks, "chunk", "chunks")
    return f"{schedule.style} over {a.world.pipeline.size()} ranks, {chunks} per rank"


def tile_mlps(a: Assembly) -> str | None:
    """Computes the token-wise parts of blocks in tiles of tokens."""
    if a.run.tiled_mlp is None:
        return None
    small = a.case.model().float()
    tile_blocks(a.model, a.blocks, small, a.case.inputs(), a.run.tiled_mlp, a.run.compiled)
    return f"{counted(a.run.tiled_mlp, 'token', 'tokens')} at a time"


def add_router_losses(a: Assembly) -> str | None:
    """Counts tokens by expert, and installs router losses and bias updates."""
    if a.source is None or not a.trains:
        return None
    context = a.context
    if context.experts is not None:
        context.loads = context.experts.loads
    else:
        context.loads = count_loads(a.model, a.world.device)
    context.routing = install_routers(a.model, a.source, a.run, context.loads, a.world)
    if context.routing is None:
        return None
    if context.stages is not None:
        context.stages.carried = context.routing.losses
    return _describe_routing(context.routing, context.loads)


def recompute_activations(a: Assembly) -> str | None:
    """Activation checkpointing: saves only inputs of blocks (maybe on the host) and attention."""
    if a.run.recompute != "full":
        return None
    blocks = a.blocks[: a.run.recompute_blocks]
    inputs = None
    offloaded = 0
    if a.run.offload.activations == "cpu":
        inputs = BlockInputs(None, host=True, timer=a.timer)
        offloaded = len(blocks[: a.run.offload.activation_blocks])
    saved = None if a.run.recompute_attention else SavedAttention()
    for number, (_, block) in enumerate(blocks):
        around = {}
        if saved is not None:
            around["context_fn"] = saved.around(block, inputs if number < offloaded else None)
        recompute(block, **around)
    if inputs is not None:
        chunks = _chunks(a)
        of_chunk: dict[Any, Blocks] = {}
        for name, block in blocks[: offloaded : a.run.recompute_group]:
            of_chunk.setdefault(chunks.get(block), []).append((name, block))
        for passed_through in of_chunk.values():
            inputs.attach(passed_through)
    if a.run.recompute_group > 1:
        save_inputs_by_group(blocks, a.run.recompute_group, inputs, saved)
    a.saved_attention = saved
    line = counted(len(blocks), "block", "blocks")
    if a.run.recompute_group > 1:
        line += f" in groups of {a.run.recompute_group}"
    if inputs is not None:
        line += f", inputs of {offloaded} offloaded to the CPU"
    if saved is not None:
        line += ", attention saved"
    return line


def compile_blocks(a: Assembly) -> str | None:
    """Compiles each block, inside of the hooks of sharding and checkpointing."""
    if not a.run.compiled:
        return None
    failures: list[str] = []
    light = a.run.recompute == "light"
    count = 0
    for _, block in a.blocks:
        if a.context.tensor is None:
            block.forward = compiled(block.forward, light, failures)
        elif (local := a.context.tensor.local.get(block)) is not None:
            local.compute = compiled(local.compute, light, failures)
        else:  # DTensors run as they are written
            continue
        count += 1
    return f"{count} of {len(a.blocks)} blocks"


def fully_shard_experts(a: Assembly) -> str | None:
    """Shards experts over the ranks that hold the same ones."""
    if a.context.experts is None:
        return None
    shard_experts(
        a.context.experts,
        a.world,
        a.run.parallel.zero,
        a.run.precision,
        a.run.parallel.reduce_dtype,
    )
    assert a.world.expert_shards is not None
    layers = counted(len(a.context.experts.modules), "layer", "layers")
    return f"{layers} over {_describe_mesh(a.world.expert_shards)}"


def fully_shard_blocks(a: Assembly) -> str | None:
    """ZeRO on FSDP2: blocks (or what fits a bucket), then the rest."""
    if a.choose_comm is not None:
        a.comm = a.choose_comm(a.model, a.blocks)
    chunks = _chunks(a)
    modules = dict(a.blocks)
    options = ShardOptions(
        a.comm.bucket,
        a.comm.together,
        is_unsharded(a.run, a.world),
        a.run.parallel.reduce_dtype,
        _indivisible(a),
        lambda name: (list_of(name), chunks.get(modules[name])),
    )
    shard_model(a.model, a.blocks, a.world.mesh, a.run.parallel.zero, a.run.precision, options)
    return f"ZeRO-{a.run.parallel.zero} over {_describe_mesh(a.world.mesh)}, {a.run.precision}"


def materialize_parameters(a: Assembly) -> str | None:
    """Allocates the shards on the device, or leaves them to offloading."""
    if a.source is None or a.run.offload.parameters == "none":
        a.materialise(a.model, a.world.device)
        return None
    stub_out(a.model, a.world.device)
    if a.world.device.type == "cpu":
        return_freed_memory()
    return f"parameters on {a.run.offload.parameters}"


def create_sharded_model(a: Assembly) -> str | None:
    """Creates the ShardedModel: which parameters are trained, saved and counted."""
    a.sharded = ShardedModel(a.model, a.run.parallel.zero, a.world.mesh)
    a.sharded.kept = None if a.adapted is None else a.adapted.kept
    a.sharded.embedding_only_numel = a.embedding_only_numel
    a.sharded.timer = a.timer
    if a.saved_attention is not None:
        a.sharded.ineffective_notes = a.saved_attention.idle
    if a.run.parallel.uses_model_parallelism:
        a.context.take(a.sharded)
    return None


def install_communication(a: Assembly) -> str | None:
    """Installs ZeRO++'s collectives, prefetching and overlapped reductions."""
    if not a.trains:
        return None
    parallel = a.run.parallel
    line = install_collectives(
        a.sharded,
        parallel,
        a.world,
        a.run.timeout,
        float8_gathers(a.run, a.world.mesh.size(1)),
        [] if a.context.experts is None else a.context.experts.modules,
    )
    prefetch = a.comm.prefetch
    # The last part of a split backward, which reduces, is within none.
    reductions = not (parallel.quantize_gradients or schedule_of(parallel).splits)
    ahead = install_overlap(a.sharded, prefetch, reductions, a.timer.on, _chunks(a).get)
    if ahead and prefetch is not None:
        prefetched = f"{counted(prefetch, 'unit', 'units')} prefetched"
        line = f"{line}; {prefetched}" if line else prefetched
    return line or None


STEPS: tuple[Step, ...] = (
    add_adapters,
    split_master_weights,
    use_fp8_linears,
    group_experts,
    multiply_frozen_bases_in_fp8,
    build_tiny_model,
    use_expert_parallelism,
    cut_into_stages,
    use_tensor_parallelism,
    use_context_parallelism,
    build_pipeline,
    tile_mlps,
    add_router_losses,
    recompute_activations,
    compile_blocks,
    fully_shard_experts,
    fully_shard_blocks,
    materialize_parameters,
    create_sharded_model,
    install_communication,
)


def _chunks(a: Assembly) -> dict[nn.Module, tuple[int, ...]]:
    """The pipeline chunks that the modules of blocks run with; none if this rank has only one."""
    stages = a.context.stages
    chunks: dict[nn.Module, tuple[int, ...]] = {}
    if stages is not None and len(stages.chunks) > 1:
        for name, block in a.blocks:
            chunks |= dict.fromkeys(block.modules(), stages.chunks_of(name))
    return chunks


def _indivisible(a: Assembly) -> frozenset[nn.Module]:
    """Modules that use parameters of their submodules at once: units must not split them."""
    tensor = a.context.tensor
    if tensor is None:
        return frozenset()
    return frozenset([*tensor.local, *map(a.model.get_submodule, tensor.unsharded)])


def _describe_routing(routing: Routing, loads: ExpertLoads | None) -> str | None:
    """What was added for the routers; None if nothing was."""
    weights = routing.losses.terms
    added = []
    if loads is not None:
        added.append("loads counted")
    if weights.aux:
        added.append(f"auxiliary loss × {weights.aux:g}")
    if weights.z:
        added.append(f"z-loss × {weights.z:g}")
    if routing.bias is not None:
        added.append(f"bias moves by {routing.bias.rate:g} a step")
    return ", ".join(added) or None


def _describe_mesh(mesh: DeviceMesh) -> str:
    """The ranks and replicas of a (replicate, shard) mesh, in words."""
    ranks = counted(mesh.size(1), "rank", "ranks")
    return f"{ranks}, {counted(mesh.size(0), 'replica', 'replicas')}"


def embedding_only_parameters(model: Any) -> int:
    """Parameters of the input embedding, which cost no FLOPs; 0 if it is tied to the head."""
    inner = model.get_input_embeddings()
    outer = model.get_output_embeddings()
    if outer is not None and outer.weight is inner.weight:
        return 0
    return int(inner.weight.numel())


def block_weights(model: Any) -> dict[str, float]:
    """The cost of each block, by its parameters; the last block includes the head."""
    weights = sizes_of(model)
    head = model.get_output_embeddings()
    if weights and head is not None:
        weights[list(weights)[-1]] += head.weight.numel()
    return weights
