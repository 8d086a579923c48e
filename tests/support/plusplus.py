"""Functions that the tests of ZeRO++ run on ranks (see ranks.py)."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist


def _world(node: int, shard: int) -> Any:
    from shardwise.distributed.mesh import MeshLayout, join_world, split_shards

    world = join_world("cpu", "gloo", 60, MeshLayout(dist.get_world_size() // shard, shard))
    return split_shards(world.layout.dense_mesh, node, world.device, 60), world.mesh["shard"].get_group()


def gathers(node: int, shard: int, cases: list[tuple[int, bool, torch.dtype]]) -> list[dict[str, Any]]:
    """For each (n, quantized, dtype): our gather of this rank's n numbers and a plain one; then again after the input
    changed, and after forget()."""
    from shardwise.parallel.zero.collectives import Int8Packing, WeightGather

    hops, group = _world(node, shard)
    results = []
    for n, quantized, dtype in cases:
        gather = WeightGather(Int8Packing() if quantized else None, hops if node < shard else None)
        made = torch.Generator().manual_seed(dist.get_rank())
        values = [(9 * torch.randn(n, generator=made)).abs().to(dtype) for _ in range(2)]
        rounds = [_both(gather, values[0], group, node)]
        rounds.append(_both(gather, values[1], group, node))  # hpZ must not notice
        gather.forget()
        rounds.append(_both(gather, values[1], group, node))
        results.append(dict(zip(("ours", "plain", "moved", "across"), zip(*rounds, strict=True), strict=True)))
    return results


def _both(gather: Any, value: torch.Tensor, group: Any, node: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    from shardwise.parallel.zero.accounting import WireCount
    from shardwise.parallel.zero.collectives import all_gather

    n = value.numel()
    out = torch.empty(group.size() * n, dtype=value.dtype)
    mine = out[group.rank() * n : (group.rank() + 1) * n].copy_(value)
    with WireCount(node) as wire:
        gather(output_tensor=out, input_tensor=mine, group=group)
    if gather._hops is None and group.size() > 1:
        assert gather.moved(mine, group.size()) == sum(wire.bytes.values())
    reference = torch.empty_like(out)
    all_gather(reference, value, group=group)
    return out, reference, sum(wire.bytes.values()), sum(wire.across.values())


def reductions(node: int, shard: int, feedback: bool, cases: list[tuple[int, Any, int]]) -> list[dict[str, Any]]:
    """For each (n, op, repeats): one quantised reduction, the mean of `repeats` of them, the exact one, and the bytes
    of one, in all and across nodes. Each rank's slice has a size of its own, so that a swap would show."""
    from shardwise.parallel.zero.accounting import WireCount
    from shardwise.parallel.zero.collectives import GradientReduce, all_gather

    torch.manual_seed(0)  # what rounding is seeded by
    hops, group = _world(node, shard)
    results = []
    for n, op, repeats in cases:
        reduce = GradientReduce(hops if node < shard else None, feedback)
        gradient = torch.randn(shard, n, generator=torch.Generator().manual_seed(dist.get_rank()))
        gradient *= 10.0 ** torch.arange(shard)[:, None]
        outs = []
        for _ in range(repeats):
            out = torch.empty(n)
            with WireCount(node) as wire:
                reduce(output_tensor=out, input_tensor=gradient.view(-1), group=group, op=reduce_op(op))
            outs.append(out)
        every = torch.empty(shard * shard * n)
        all_gather(every, gradient.view(-1), group=group)
        factor = {"avg": 1 / shard, "sum": 1.0}.get(op, op)
        exact = every.view(shard, shard, n).sum(0)[group.rank()] * factor
        results.append({"one": outs[0], "mean": torch.stack(outs).mean(0), "exact": exact,
                        "held": reduce.error_bytes, "bytes": sum(wire.bytes.values()),
                        "across": sum(wire.across.values())})  # fmt: skip
    return results


def reduce_op(op: Any) -> Any:
    """What FSDP would pass."""
    if isinstance(op, float):
        return dist._make_nccl_premul_sum(op)  # type: ignore[attr-defined]
    return {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}[op]


def counted_steps(run: dict[str, Any], node: int, steps: int = 3) -> dict[str, Any]:
    """Bytes by kind, and bytes across nodes, of each step; bytes of secondary shards after backward and between steps;
    gathers by size of their group in the last step."""
    from shardwise.parallel.zero.accounting import WireCount
    from shardwise.train.loop import accumulate, seed_step
    from support.scenarios import batch_of, parts_of

    os.environ["LOCAL_WORLD_SIZE"] = str(node)
    parts = parts_of(run)
    bytes_, across, held = [], [], []
    for step in range(steps):
        seed_step(0, step, parts.world.rank)
        with _Groups(node) as wire:
            accumulate(parts, batch_of(parts, step))
        held.append((_secondary(parts), 0))
        parts.sharded.clip(1.0)
        parts.optimizer.step()
        parts.sharded.updated()
        parts.optimizer.zero_grad()
        held[-1] = (held[-1][0], _secondary(parts))
        bytes_.append(sum(wire.bytes.values()))
        across.append(sum(wire.across.values()))
    assert isinstance(wire, WireCount)
    return {"parameters": parts.job.parameters, "bytes": bytes_, "across": across, "held": held,
            "gathers": dict(wire.gathers), "units": len(parts.sharded.on_update) or None}  # fmt: skip


def _secondary(parts: Any) -> int:
    return sum(forget.__self__.secondary_bytes for forget in parts.sharded.on_update)


def _Groups(node: int) -> Any:
    from shardwise.parallel.zero.accounting import WireCount, collective_of

    class Groups(WireCount):
        """Counts gathers by the ranks of their group too."""

        def __init__(self) -> None:
            super().__init__(node)
            self.gathers: Counter[tuple[int, ...]] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            collective = collective_of(func, args, result)
            if collective is not None and collective.kind == "all_gather":
                self.gathers[collective.ranks] += 1
            return result

    return Groups()


def train_on_nodes(run: dict[str, Any], node: int) -> Any:
    """scenarios.train on hosts of `node` ranks each."""
    from support.scenarios import train

    os.environ["LOCAL_WORLD_SIZE"] = str(node)
    return train(run)


def evaluate_between_updates(run: dict[str, Any]) -> list[float]:
    """Evaluation losses before and after the parameters changed by hand, in the middle of a step."""
    from shardwise.train.loop import accumulate, evaluate
    from support.scenarios import batch_of, parts_of

    parts = parts_of(run)
    accumulate(parts, batch_of(parts, 0))
    losses = [evaluate(parts)]
    with torch.no_grad():
        for parameter in parts.sharded.parameters.values():
            parameter.mul_(0.5)
    losses.append(evaluate(parts))
    return losses


def forgetful_step(run: dict[str, Any], tell: bool) -> list[float]:
    """Losses of the same batch over four steps, with or without telling the model that it was updated."""
    from shardwise.train.loop import accumulate
    from support.scenarios import batch_of, parts_of

    parts = parts_of(run)
    losses = []
    for _ in range(4):
        loss = accumulate(parts, batch_of(parts, 0))
        dist.all_reduce(loss)
        losses.append(loss.item())
        parts.optimizer.step()
        if tell:
            parts.sharded.updated()
        parts.optimizer.zero_grad()
    return losses
