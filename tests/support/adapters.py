"""Functions that tests of adapters run on ranks (see ranks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.scenarios import batch_of, parts_of

IDS = torch.arange(2 * 48).view(2, 48) * 7 % 515


def train(run: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Runs to the end; losses, and what was trained: parameters, bytes of the optimizer, names in the checkpoint."""
    from shardwise.checkpoint.hf import find_checkpoint
    from shardwise.adapters.export import stored_tensors
    from shardwise.observe.metrics import read_metrics
    from shardwise.train.loop import fit
    from shardwise.zero.account import held_bytes

    parts = parts_of(run)
    fit(parts)
    records = [r for r in read_metrics(Path(run["output"]) / "metrics.jsonl") if r["kind"] == "train"]
    facts = {
        "trainable": sum(p.numel() for p in parts.sharded.parameters.values()),
        "dtypes": {str(p.dtype) for p in parts.sharded.parameters.values()},
        "frozen": {str(p.dtype) for p in parts.sharded.model.parameters() if not p.requires_grad},
        "plan": parts.job.adapted,
        "held": held_bytes(parts.sharded, parts.optimizer),
        "stored": set(stored_tensors(find_checkpoint(Path(run["output"])))),
    }
    return [r["loss"] for r in records], facts


def bare_logits(run: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the trained adapter and of the bare base, and again of the adapter; after two steps of training."""
    from shardwise.adapters.layers import adapter_disabled
    from shardwise.train.loop import accumulate

    parts = parts_of(run)
    for step in range(2):
        accumulate(parts, batch_of(parts, step))
        parts.update()
    model = parts.sharded.model
    with parts.sharded.evaluation():
        first = model(input_ids=IDS).logits
        with adapter_disabled(model):
            bare = model(input_ids=IDS).logits
        return first, bare, model(input_ids=IDS).logits
