"""ZeRO++ as the run describes it: which collectives FSDP2's units get, over which ranks.

  secondary_shard     hpZ  the global gather happens once a step; later ones stay within `secondary_shard` ranks
  quantize_weights    qwZ  gathers as int8: half of bf16
  quantize_gradients  qgZ  reductions in 4 bits: an eighth of fp32. In a group of several nodes with several ranks
                           each, in 8 bits within a node, and of each node's sum only in 4 across
  gradient_feedback        what those 4 bits lost is added the next time
All act within a shard group. With hybrid sharding, the all-reduce between groups stays in fp32.
"""

from __future__ import annotations

import math

from torch.distributed.fsdp import FSDPModule

from shardwise.config.schema import Parallel
from shardwise.parallel.mesh import Hops, World, ranks_per_node, split_shards
from shardwise.zero.collectives import GradientReduce, WeightGather
from shardwise.zero.stages import ShardedModel


def install_collectives(sharded: ShardedModel, parallel: Parallel, world: World, timeout: float) -> None:
    """Replaces the model's gathers and reductions by what the settings ask for; collective: every rank calls it."""
    shard = world.mesh.size(1)
    # One node that is the whole group: every gather stays within it as it is.
    secondary = None if parallel.secondary_shard == shard else parallel.secondary_shard
    if shard == 1 or not (secondary or parallel.quantize_weights or parallel.quantize_gradients):
        return
    units = [m for m in sharded.model.modules() if isinstance(m, FSDPModule)]
    hops: dict[int, Hops] = {}

    def hops_of(size: int) -> Hops:
        if size not in hops:
            hops[size] = split_shards(world.mesh, size, timeout)
        return hops[size]

    if secondary or parallel.quantize_weights:
        for unit in units:
            gather = WeightGather(parallel.quantize_weights, hops_of(secondary) if secondary else None)
            unit.set_custom_all_gather(gather)
            sharded.on_update.append(gather.forget)
    if parallel.quantize_gradients:
        node, feedback = ranks_per_node(shard, world.control), parallel.gradient_feedback is not False
        for unit in units:
            reduce = GradientReduce(hops_of(node) if 1 < node < shard else None, feedback)
            unit.set_custom_reduce_scatter(reduce)
            sharded.on_save.append(reduce.forget)


def describe_collectives(parallel: Parallel, shard: int, local: int) -> str:
    """What is said of it in the plan of a run with `local` ranks on each host; empty without any."""
    said = []
    if parallel.quantize_weights and shard > 1:
        said.append("gathers in int8 (qwZ)")
    if parallel.quantize_gradients and shard > 1:
        width = "in 4 bits between nodes, 8 within" if _node_of(shard, local) > 1 else "in 4 bits"
        feedback = ", adding what rounding lost" if parallel.gradient_feedback is not False else ""
        said.append(f"reduces {width}{feedback} (qgZ)")
    if parallel.secondary_shard == shard:
        said.append(f"hpZ does nothing: secondary_shard {shard} is the whole shard group, whose gathers stay within it")
    elif parallel.secondary_shard is not None:
        later = parallel.secondary_shard
        kept = f"then within {later} ranks" if later > 1 else "and keeps all of it on every rank"
        said.append(f"gathers globally once a step, {kept} (hpZ)")
    return "".join(f"; {words}" for words in said)


def held_besides(
    parallel: Parallel, shard: int, local: int, parameters: int, frozen_bytes: int, precision: str
) -> dict[str, float]:
    """Bytes of device memory that a rank gives to ZeRO++, by kind, with `local` ranks on each host.

    `parameters` are those that are trained.
    """
    held = {}
    if parallel.secondary_shard not in (None, shard):
        working = {"fp32": 4}.get(precision, 2)
        size = working * parameters + frozen_bytes
        held["hpZ's second copy"] = size / (working if parallel.quantize_weights else 1) / parallel.secondary_shard
    if parallel.quantize_gradients and parallel.gradient_feedback is not False and shard > 1:
        held["qgZ's lost roundings"] = 2 * parameters / _node_of(shard, local)
    return held


def _node_of(shard: int, local: int) -> int:
    """Ranks of a node that reduce among themselves first; 1 where one hop does: within a node, or a rank a node."""
    node = math.gcd(shard, local)
    return node if node < shard else 1
