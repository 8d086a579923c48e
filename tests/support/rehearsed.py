"""The same step twice: on ranks that are there, and rehearsed."""

from __future__ import annotations

from collections import Counter
from typing import Any


def _target(run: dict[str, Any], ranks: int) -> Any:
    from shardwise.config.load import load_run
    from shardwise.foresight.rehearse.target import aim

    return aim(load_run(run), 1, ranks)


def _told(tracker: Any, held: dict[str, int]) -> dict[str, Any]:
    moved: Counter[str] = Counter()
    for phase, _, one in tracker.collectives:
        moved[f"{phase} {one.kind} {one.ranks}"] += one.bytes
    return {"peak": tracker.peak, "held": held, "moved": dict(moved)}


def for_real(run: dict[str, Any], ranks: int) -> dict[str, Any]:
    """A rank of a process group of real processes, with real memory."""
    import torch

    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.rehearse.batch import step_batch
    from shardwise.foresight.rehearse.step import set_up, watch

    target = _target(run, ranks)
    world = init_world(target.run)
    parts, optimizer = set_up(target.source, target.run, world, None)
    for parameter in parts.sharded.model.parameters():
        torch.nn.init.normal_(getattr(parameter, "_local_tensor", parameter), std=0.02)
    per_rank = target.run.train.batch_size // world.layout.data // int(target.run.train.micro_batch_size)
    return _told(*watch(parts, optimizer, step_batch(target.run, per_rank)))


def rehearsed(run: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Every rank, one after the other, each in a process of its own."""
    from shardwise.foresight.rehearse.step import Alike
    from shardwise.foresight.rehearse.subprocess import run_isolated

    known, found = Alike(), []
    for rank in range(ranks):
        told, known = run_isolated(_one, run, ranks, rank, known)
        found.append(told)
    return found


def _one(run: dict[str, Any], ranks: int, rank: int, known: Any) -> tuple[dict[str, Any], Any]:
    from shardwise.foresight.rehearse.step import rehearse

    target = _target(run, ranks)
    batch, micro = target.run.train.batch_size, int(target.run.train.micro_batch_size)
    axes = target.run.parallel
    per_rank = batch // (ranks // (axes.tensor * axes.context * axes.pipeline)) // micro
    result = rehearse(target.source, target.run, rank, ranks, per_rank, known=known)
    return _told(result.tracker, result.held), known
