"""A plan as plain values, for `--json` and other programs."""

from __future__ import annotations

from typing import Any

from shardwise.foresight.plan.estimate import Estimate
from shardwise.foresight.plan.explain import describe, guidelines, reasons
from shardwise.foresight.plan.search import Option, Plan


def as_dict(plan: Plan, tokens: float | None) -> dict[str, Any]:
    """Returns the whole plan as a dictionary that can be written as JSON."""
    sizes = plan.quick.of.sizes if plan.quick is not None else None
    cluster = plan.cluster
    run = plan.run
    return {
        "model": {
            "name": plan.source.label,
            "type": plan.source.config.model_type,
            "parameters": round(sizes.block * sizes.layers + sizes.rest) if sizes else None,
            "layers": sizes.layers if sizes else None,
        },
        "cluster": {
            "device": cluster.device.name, "nodes": cluster.nodes, "per_node": cluster.per_node, "ranks": cluster.ranks,
            "memory": cluster.device.memory, "within": cluster.within.bandwidth, "across": cluster.across.bandwidth,
            "host_memory": cluster.host_memory, "price": cluster.price,
        },
        "run": {
            "sequence_length": run.data.sequence_length, "batch_size": run.train.batch_size, "method": run.method.type,
            "precision": run.precision, "fp8": run.fp8.recipe, "optimizer": run.train.optimizer, "tokens": tokens,
        },
        "considered": plan.considered,
        "strategies": [option_dict(option, tokens) for option in (*plan.options, *plan.too_large)],
        "reasons": reasons(plan),
        "guidelines": [{"rule": r, "here": h, "agrees": a} for r, h, a in guidelines(plan)],
        "refused": plan.refused,
    }  # fmt: skip


def option_dict(option: Option, tokens: float | None) -> dict[str, Any]:
    """Returns a strategy with its settings and estimate."""
    return {"name": option.strategy.name(), "told": describe(option.strategy), "settings": option.strategy.settings(),
            **estimate_dict(option.estimate, tokens)}  # fmt: skip


def estimate_dict(estimate: Estimate, tokens: float | None) -> dict[str, Any]:
    """Returns memory in bytes, time in seconds, throughput and cost of an estimate."""
    return {
        "fits": estimate.fits,
        "memory": {name: round(size) for name, size in estimate.memory.items() if size >= 1},
        "peak": round(estimate.peak),
        "peak_at": estimate.peak_at,
        "reserved": round(estimate.reserved),
        "spare": round(estimate.spare),
        "host": round(estimate.host),
        "disk": round(estimate.disk),
        "seconds": {name: spent for name, spent in estimate.time.parts().items() if spent},
        "step_seconds": estimate.time.seconds,
        "hidden": estimate.time.hidden,
        "wire": {axis: round(size) for axis, size in estimate.time.wire.items()},
        "micro_batches": estimate.micro_batches,
        "tokens_per_step": estimate.tokens,
        "tokens_per_second": estimate.rate * estimate.cluster.ranks,
        "per_device": estimate.rate,
        "mfu": estimate.mfu,
        "hours": estimate.hours(tokens) if tokens else None,
        "cost": estimate.cost(tokens) if tokens else None,
    }
