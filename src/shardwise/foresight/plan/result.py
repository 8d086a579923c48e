"""A plan as plain values: for programs, and for the report."""

from __future__ import annotations

from typing import Any

from shardwise.foresight.plan.estimate import Estimate
from shardwise.foresight.plan.explain import guidelines, reasons, told
from shardwise.foresight.plan.search import Option, Plan


def as_dict(plan: Plan, tokens: float | None) -> dict[str, Any]:
    """Everything that is known of it."""
    sizes = plan.quick.of.sizes if plan.quick is not None else None
    cluster, run = plan.cluster, plan.run
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
    """A strategy with what it takes."""
    return {"name": option.strategy.name(), "told": told(option.strategy), "settings": option.strategy.settings(),
            **estimate_dict(option.estimate, tokens)}  # fmt: skip


def estimate_dict(found: Estimate, tokens: float | None) -> dict[str, Any]:
    """What a run takes: bytes and seconds."""
    return {
        "fits": found.fits,
        "memory": {name: round(size) for name, size in found.memory.items() if size >= 1},
        "peak": round(found.peak),
        "peak_at": found.peak_at,
        "reserved": round(found.reserved),
        "spare": round(found.spare),
        "host": round(found.host),
        "disk": round(found.disk),
        "seconds": {name: spent for name, spent in found.time.parts().items() if spent},
        "step_seconds": found.time.seconds,
        "hidden": found.time.hidden,
        "wire": {axis: round(size) for axis, size in found.time.wire.items()},
        "micro_batches": found.micro_batches,
        "tokens_per_step": found.tokens,
        "tokens_per_second": found.rate * found.cluster.ranks,
        "per_device": found.rate,
        "mfu": found.mfu,
        "hours": found.hours(tokens) if tokens else None,
        "cost": found.cost(tokens) if tokens else None,
    }
