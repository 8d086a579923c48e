"""Functions that tests run on ranks (see ranks.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def parts_of(run: dict[str, Any]) -> Any:
    """The loop's parts, built by the real set-up."""
    from shardwise.config.load import load_run
    from shardwise.parallel.mesh import init_world
    from shardwise.train.job import prepare_job
    from shardwise.train.setup import build_parts
    from shardwise.train.status import Status

    job = prepare_job(load_run(run))
    return build_parts(job, init_world(job.run), Status(None))


def full_parameters(parts: Any) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in parts.sharded.model.named_parameters()
    }


def train(run: dict[str, Any]) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Runs to the end; losses, gradient norms and final parameters."""
    from pathlib import Path

    from shardwise.observe.metrics import read_metrics
    from shardwise.train.loop import fit

    parts = parts_of(run)
    fit(parts)
    records = [r for r in read_metrics(Path(run["output"]) / "metrics.jsonl") if r["kind"] == "train"]
    return [r["loss"] for r in records], [r["grad_norm"] for r in records], full_parameters(parts)


def wire_and_memory(run: dict[str, Any], steps: int = 2) -> tuple[int, dict[str, int], list[dict[str, int]]]:
    """Parameters, elements moved in the last step, and bytes held after each micro-batch of it."""
    from shardwise.train.loop import seed_step
    from shardwise.zero.account import WireCount, held_bytes

    parts = parts_of(run)
    train, world = parts.job.run.train, parts.world
    held: list[dict[str, int]] = []
    for step in range(steps):
        seed_step(0, step, world.rank)
        batch = parts.loader.step(step * train.batch_size, train.batch_size, train.micro_batch_size, world.rank, world.size)
        held, wire = [], WireCount()
        with wire:
            scale = parts.sharded.data_parallel_size / batch.supervised
            for index, micro in enumerate(batch.micro_batches):
                parts.sharded.prepare_micro_batch(last=index == len(batch.micro_batches) - 1)
                (parts.objective(parts.sharded.model, micro) * scale).backward()
                held.append(held_bytes(parts.sharded, parts.optimizer))
        parts.sharded.clip(1.0)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    return parts.job.parameters, dict(wire.elements), held
