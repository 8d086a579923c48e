"""ZeRO++ as the run describes it: which collectives FSDP2's units get, over which ranks.

  hpz_size     hpZ  the global gather happens once a step; later ones stay within `hpz_size` ranks
  quantize_weights    qwZ  gathers as int8: half of bf16
  fp8.gather               weights of layers that multiply in fp8 are gathered so, where qwZ is not on (float8.py)
  quantize_gradients  qgZ  reductions in 4 bits: an eighth of fp32. In a group of several nodes with several ranks
                           each, in 8 bits within a node, and of each node's sum only in 4 across
  error_feedback        what those 4 bits lost is added the next time
All act within a shard group. With hybrid sharding, the all-reduce between groups stays in fp32.
"""

from __future__ import annotations

import math
from typing import Literal

from torch.distributed.fsdp import FSDPModule

from shardwise.config.schema import Parallel
from shardwise.core.compat.torch_private import parameter_groups
from shardwise.distributed.mesh import Hops, World, ranks_per_node, split_shards
from shardwise.parallel.zero.collectives import (
    GradientReduce,
    Int8Packing,
    WeightGather,
    WirePacking,
)
from shardwise.parallel.zero.float8_gather import Scales, packing_of
from shardwise.parallel.zero.stages import ShardedModel

Float8Gathers = Literal[
    "", "once", "by unit"
]  # not, or with scales compared once an update for all, or for each unit


def install_collectives(
    sharded: ShardedModel,
    parallel: Parallel,
    world: World,
    timeout: float,
    float8: Float8Gathers = "",
) -> None:
    """Replaces the model's gathers and reductions by what the settings ask for; collective: every rank calls it.

    `float8`: whether what multiplies in fp8 is gathered so (parallel/zero/float8_gather.py).
    """
    shard = world.mesh.size(1)
    # One node that is the whole group: every gather stays within it as it is.
    secondary = None if parallel.hpz_size == shard else parallel.hpz_size
    if shard == 1 or not (
        secondary or parallel.quantize_weights or parallel.quantize_gradients or float8
    ):
        return
    units = _gathered_apart(sharded)
    hops: dict[int, Hops] = {}

    def hops_of(size: int) -> Hops:
        if size not in hops:
            hops[size] = split_shards(world.mesh, size, timeout)
        return hops[size]

    packings: dict[FSDPModule, WirePacking] = {}
    if parallel.quantize_weights:
        packings = dict.fromkeys(units, Int8Packing())
    elif float8:
        packings = pack_float8(sharded, units, by_unit=float8 == "by unit")
    for unit in units:
        if secondary or unit in packings:
            gather = WeightGather(packings.get(unit), hops_of(secondary) if secondary else None)
            unit.set_custom_all_gather(gather)
            sharded.on_update.append(gather.forget)
    if parallel.quantize_gradients:
        node, feedback = ranks_per_node(shard, world.control), parallel.error_feedback is not False
        for unit in units:
            reduce = GradientReduce(hops_of(node) if 1 < node < shard else None, feedback)
            unit.set_custom_reduce_scatter(reduce)
            sharded.on_save.append(reduce.forget)


def pack_float8(
    sharded: ShardedModel, units: list[FSDPModule], by_unit: bool
) -> dict[FSDPModule, WirePacking]:
    """For each unit that has layers in fp8, how it is gathered."""
    found: dict[FSDPModule, WirePacking] = {}
    together = Scales()
    for unit in units:
        scales = Scales() if by_unit else together
        if (packing := packing_of(unit, scales)) is not None:
            found[unit] = packing
            if by_unit or len(found) == 1:
                sharded.on_update.append(scales.forget)
    return found


def _gathered_apart(sharded: ShardedModel) -> list[FSDPModule]:
    """The model's units; of modules that are gathered together, one."""
    found = {
        tuple(map(id, parameter_groups(u))): u
        for u in sharded.model.modules()
        if isinstance(u, FSDPModule)
    }
    return list(found.values())


def describe_collectives(
    parallel: Parallel, shard: int, local: int, float8: Float8Gathers = ""
) -> str:
    """What is said of it in the plan of a run with `local` ranks on each host; empty without any."""
    said = []
    if parallel.quantize_weights and shard > 1:
        said.append("gathers in int8 (qwZ)")
    elif float8 and shard > 1:
        said.append("gathers the weights of fp8 layers as fp8")
    if parallel.quantize_gradients and shard > 1:
        width = "in 4 bits between nodes, 8 within" if _node_of(shard, local) > 1 else "in 4 bits"
        feedback = ", adding what rounding lost" if parallel.error_feedback is not False else ""
        said.append(f"reduces {width}{feedback} (qgZ)")
    if parallel.hpz_size == shard:
        said.append(
            f"hpZ does nothing: hpz_size {shard} is the whole shard group, whose gathers stay within it"
        )
    elif parallel.hpz_size is not None:
        later = parallel.hpz_size
        kept = f"then within {later} ranks" if later > 1 else "and keeps all of it on every rank"
        said.append(f"gathers globally once a step, {kept} (hpZ)")
    return "".join(f"; {words}" for words in said)


def extra_bytes(
    parallel: Parallel, shard: int, local: int, parameters: int, frozen_bytes: int, precision: str
) -> dict[str, float]:
    """Bytes of device memory that a rank gives to ZeRO++, by kind, with `local` ranks on each host.

    `parameters` are those that are trained. Where weights are gathered as fp8 hpZ's copy takes less, by their share.
    """
    held = {}
    if parallel.hpz_size not in (None, shard):
        working = {"fp32": 4}.get(precision, 2)
        size = working * parameters + frozen_bytes
        held["hpZ's second copy"] = (
            size / (working if parallel.quantize_weights else 1) / parallel.hpz_size
        )
    if parallel.quantize_gradients and parallel.error_feedback is not False and shard > 1:
        held["qgZ's lost roundings"] = 2 * parameters / _node_of(shard, local)
    return held


def _node_of(shard: int, local: int) -> int:
    """Ranks of a node that reduce among themselves first; 1 where one hop does: within a node, or a rank a node."""
    node = math.gcd(shard, local)
    return node if node < shard else 1
