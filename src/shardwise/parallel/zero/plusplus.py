"""ZeRO++ as the run configures it: the collectives of FSDP2's units, and their ranks.

  hpz_size     hpZ  the global gather happens once a step; later ones stay within `hpz_size` ranks
  quantize_weights    qwZ  gathers as int8: half of bf16
  fp8.gather               gathers the weights of fp8 layers in fp8, without qwZ (float8_gather.py)
  quantize_gradients  qgZ  reductions in 4 bits: an eighth of fp32. In a group of several nodes with
                           several ranks each, 8 bits within a node and 4 for the node's sum
  error_feedback        adds what those 4 bits lost to the next reduction
All act within a shard group. With hybrid sharding, the all-reduce between groups stays in fp32.

[Note: shard groups beside axes] With tensor parallelism consecutive members of a shard group are
`tensor` ranks apart, and those of experts `expert` ranks: a node has so many fewer of them.
`hpz_size` counts members of the groups of all other weights. Experts, of which a rank has a share
already, keep their second copy on the same node.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from torch.distributed.fsdp import FSDPModule

from shardwise.config.schema import Parallel
from shardwise.core.compat.torch_private import parameter_groups
from shardwise.distributed.mesh import Hops, MeshLayout, World, ranks_per_node, split_shards
from shardwise.parallel.zero.collectives import (
    GradientReduce,
    Int8Packing,
    WeightGather,
    WirePacking,
)
from shardwise.parallel.zero.float8_gather import Scales, packing_of
from shardwise.parallel.zero.stages import ShardedModel

# None, or with scales computed once an update for all units, or for each unit.
Float8Gathers = Literal["", "once", "by unit"]


@dataclass(frozen=True)
class NodeSizes:
    """Members of a shard group: all, those that share a second copy, and those on a node."""

    mesh: tuple[int, int, int, int]  # the layout's: its third axis shards
    secondary: int | None  # None: no second copy
    node: int  # 1 if two hops would gain nothing

    @property
    def shard(self) -> int:
        """Members of a group."""
        return self.mesh[2]


def node_sizes(
    parallel: Parallel, layout: MeshLayout, local: int, experts: bool = False
) -> NodeSizes:
    """Sizes for the groups that shard experts, or all other weights, with `local` ranks a host."""
    mesh = layout.expert_mesh if experts else layout.dense_mesh
    shard = mesh[2]
    secondary = parallel.hpz_size
    if secondary is not None and experts:
        secondary = math.gcd(shard, max(1, secondary * layout.tensor // layout.expert))
    if secondary == shard:  # with one node for the full group, every gather stays within it anyway
        secondary = None
    return NodeSizes(mesh, secondary, _node_of(shard, local, mesh[3]))


def install_collectives(
    sharded: ShardedModel,
    parallel: Parallel,
    world: World,
    timeout: float,
    float8: Float8Gathers = "",
    experts: Collection[object] = (),
) -> str:
    """Replaces the model's gathers and reductions as the settings say, and describes what changed.

    A collective.

    `float8`: whether the weights of fp8 layers are gathered in fp8 (float8_gather.py). `experts`:
    the units that are sharded over the experts' mesh.
    """
    quantized = parallel.quantize_weights or parallel.quantize_gradients
    if not (parallel.hpz_size or quantized or float8):
        return ""
    layout = world.layout
    local = ranks_per_node(world.control) if parallel.quantize_gradients else 1
    dense = of_experts = node_sizes(parallel, layout, local)
    if layout.expert > 1:  # the same on every rank: a stage may have none
        of_experts = node_sizes(parallel, layout, local, experts=True)
    hops: dict[tuple[NodeSizes, int], Hops] = {}
    for sizes in dict.fromkeys((dense, of_experts)):
        for size in dict.fromkeys((sizes.secondary, sizes.node)):
            if size is not None and (size > 1 or size == sizes.secondary):
                hops[sizes, size] = split_shards(sizes.mesh, size, world.device, timeout)
    units: dict[FSDPModule, NodeSizes] = {}
    for unit in _distinct_units(sharded):
        sizes = of_experts if unit in experts else dense
        if sizes.shard > 1:
            units[unit] = sizes
    packings: dict[FSDPModule, WirePacking] = {}
    if parallel.quantize_weights:
        packings = dict.fromkeys(units, Int8Packing())
    elif float8:
        packings = pack_float8(sharded, list(units), by_unit=float8 == "by unit")
    for unit, sizes in units.items():
        if sizes.secondary is not None or unit in packings:
            across = None if sizes.secondary is None else hops[sizes, sizes.secondary]
            gather = WeightGather(packings.get(unit), across)
            unit.set_custom_all_gather(gather)
            sharded.on_update.append(gather.forget)
    if parallel.quantize_gradients:
        feedback = parallel.error_feedback is not False
        for unit, sizes in units.items():
            reduce = GradientReduce(hops.get((sizes, sizes.node)), feedback)
            unit.set_custom_reduce_scatter(reduce)
            sharded.on_save.append(reduce.forget)
    notes = describe_collectives(parallel, dense.shard, local, float8 if packings else "")
    return notes.removeprefix("; ")


def pack_float8(
    sharded: ShardedModel, units: list[FSDPModule], by_unit: bool
) -> dict[FSDPModule, WirePacking]:
    """The encodings of the units that have fp8 layers, with joint scales unless `by_unit`."""
    packings: dict[FSDPModule, WirePacking] = {}
    scales = Scales()
    for unit in units:
        if by_unit:
            scales = Scales()
        packing = packing_of(unit, scales)
        if packing is not None:
            packings[unit] = packing
            if by_unit or len(packings) == 1:
                sharded.on_update.append(scales.forget)
    return packings


def _distinct_units(sharded: ShardedModel) -> list[FSDPModule]:
    """The model's units; the last of modules that are gathered together."""
    units: dict[tuple[int, ...], FSDPModule] = {}
    for module in sharded.model.modules():
        if isinstance(module, FSDPModule):
            units[tuple(map(id, parameter_groups(module)))] = module
    return list(units.values())


def describe_collectives(
    parallel: Parallel, shard: int, local: int, float8: Float8Gathers = ""
) -> str:
    """A note for the plan of a run with `local` ranks on each host; empty without ZeRO++."""
    notes = []
    if parallel.quantize_weights and shard > 1:
        notes.append("gathers in int8 (qwZ)")
    elif float8 and shard > 1:
        notes.append("gathers the weights of fp8 layers as fp8")
    if parallel.quantize_gradients and shard > 1:
        note = "reduces in 4 bits"
        if _node_of(shard, local, parallel.tensor) > 1:
            note += " between nodes, 8 within"
        if parallel.error_feedback is not False:
            note += ", adding what rounding lost"
        notes.append(f"{note} (qgZ)")
    size = parallel.hpz_size
    if size == shard:
        notes.append(
            f"hpZ does nothing: hpz_size {shard} is the whole shard group, "
            "whose gathers stay within it"
        )
    elif size == 1:
        notes.append("gathers globally once a step, and keeps all of it on every rank (hpZ)")
    elif size is not None:
        notes.append(f"gathers globally once a step, then within {size} ranks (hpZ)")
    return "".join(f"; {note}" for note in notes)


def extra_bytes(
    parallel: Parallel, shard: int, local: int, parameters: int, frozen_bytes: int, precision: str
) -> dict[str, float]:
    """Bytes of device memory that ZeRO++ takes on a rank, by kind, with `local` ranks on each host.

    `parameters` are the trained ones. Where weights are gathered as fp8 hpZ's copy takes less.
    """
    result = {}
    if parallel.hpz_size not in (None, shard):
        working = 4 if precision == "fp32" else 2
        size: float = working * parameters + frozen_bytes
        if parallel.quantize_weights:
            size = size / working
        result["hpZ's second copy"] = size / parallel.hpz_size
    if parallel.quantize_gradients and parallel.error_feedback is not False and shard > 1:
        node = _node_of(shard, local, parallel.tensor)
        result["qgZ's lost roundings"] = 2 * parameters / node
    return result


def _node_of(shard: int, local: int, apart: int) -> int:
    """Members of a group on a node that reduce first, with one in every `apart` ranks a member.

    1 for a single hop: one node, or one member per node.
    """
    node = math.gcd(shard, local // apart if local % apart == 0 else 1)
    return node if node < shard else 1
