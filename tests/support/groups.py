"""One step's gradients, and how many forwards of blocks it took."""

from __future__ import annotations

from typing import Any

import torch

BASE: dict[str, Any] = {
    "data": {"train": "none", "sequence_length": 128}, "objective": "causal", "precision": "fp32", "device": "cpu",
    "ranks": 1, "backend": "gloo", "recompute": "full", "parallel": {"zero": 2},
    "train": {"batch_size": 4, "micro_batch_size": 2, "steps": 2},
}  # fmt: skip


def gradients(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the same weights and tokens, for each of several runs."""
    return [_gradients(run) for run in runs]


def _gradients(values: dict[str, Any]) -> dict[str, Any]:
    from shardwise.config.schema import Run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.bench.train import give_values
    from shardwise.foresight.rehearse.batch import step_batch
    from shardwise.foresight.rehearse.step import set_up
    from shardwise.nn.models.build import find_blocks
    from shardwise.nn.models.source import ModelSource, config_from
    from shardwise.train.loop import accumulate

    run = Run.model_validate(values)
    task = "seq2seq" if run.objective.type == "seq2seq" else "causal"
    source = ModelSource("tiny", config_from(dict(values["model"]["config"])), None, "none", task=task)
    parts, _ = set_up(source, run, init_world(run), None)
    torch.manual_seed(0)
    give_values(parts.sharded.model)
    counted = [0]
    for _, block in find_blocks(parts.sharded.model):
        own = block.forward

        def call(*args: Any, own: Any = own, **kwargs: Any) -> Any:
            counted[0] += 1
            return own(*args, **kwargs)

        block.forward = call  # type: ignore[method-assign]
    batch = step_batch(run, 2)
    for micro in batch.micro_batches:
        micro.input_ids.random_(0, 500)
    torch.manual_seed(1)
    accumulate(parts, batch)
    found: dict[str, Any] = {name: p.grad for name, p in parts.sharded.model.named_parameters() if p.grad is not None}
    full = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
    return full | {"forwards": torch.tensor(counted[0])}
