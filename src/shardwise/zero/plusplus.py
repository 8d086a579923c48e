"""ZeRO++ as the run describes it: which collectives FSDP2's units get, over which ranks.

  secondary_shard     hpZ  the global gather happens once a step; later ones stay within `secondary_shard` ranks
  quantize_weights    qwZ  gathers as int8: half of bf16
  quantize_gradients  qgZ  reductions in 4 bits: an eighth of fp32; across nodes, of each node's sum only
  gradient_feedback        what those 4 bits lost is added the next time
All act within a shard group. With hybrid sharding, the all-reduce between groups stays in fp32.
"""

from __future__ import annotations

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
        node = ranks_per_node(shard, world.control)
        for unit in units:
            reduce = GradientReduce(hops_of(node) if 1 < node < shard else None, parallel.gradient_feedback)
            unit.set_custom_reduce_scatter(reduce)
            sharded.on_save.append(reduce.forget)


def describe_collectives(parallel: Parallel, shard: int, parameters: int, precision: str) -> str:
    """What is said of it in the plan of a run, with what the secondary shard takes; empty without any."""
    if shard == 1:
        return ""
    said = []
    if parallel.quantize_weights:
        said.append("gathers in int8")
    if parallel.quantize_gradients:
        said.append("reduces in 4 bits" + (", adding what was lost" if parallel.gradient_feedback else ""))
    if parallel.secondary_shard not in (None, shard):
        each = 1 if parallel.quantize_weights else {"fp32": 4}.get(precision, 2)
        held = each * parameters / parallel.secondary_shard / 2**20
        said.append(f"gathers globally once a step and keeps {held:,.0f} MiB for the others (hpZ)")
    return "".join(f"; {words}" for words in said)
