"""Functions that tests of adapters run on ranks (see ranks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.scenarios import batch_of, full_parameters, parts_of

IDS = torch.arange(2 * 48).view(2, 48) * 7 % 515
Trained = tuple[list[float], dict[str, Any]]


def train(run: dict[str, Any]) -> Trained:
    """Runs to the end; losses, and the facts: counts, bytes, types, and the names in the checkpoint."""
    from shardwise.checkpoint.adapter_state import stored_tensors
    from shardwise.checkpoint.hf import find_checkpoint
    from shardwise.observe.metrics import read_metrics
    from shardwise.parallel.zero.accounting import held_bytes
    from shardwise.train.loop import fit

    parts = parts_of(run)
    fit(parts)
    records = [r for r in read_metrics(Path(run["output"]) / "metrics.jsonl") if r["kind"] == "train"]
    model = parts.sharded.model
    facts = {
        "trainable": sum(p.numel() for p in parts.sharded.parameters.values()),
        "trained_types": {p.dtype for p in model.parameters() if p.requires_grad},
        "frozen_types": {p.dtype for p in model.parameters() if not p.requires_grad},
        "adapted": parts.job.adapted,
        "held": held_bytes(parts.sharded, parts.optimizer),
        "stored": set(stored_tensors(find_checkpoint(Path(run["output"])))),
    }
    return [r["loss"] for r in records], facts


def train_each(runs: dict[Any, dict[str, Any]]) -> dict[Any, Trained]:
    """`train` for several runs in the same processes."""
    return {name: train(run) for name, run in runs.items()}


def bare_logits(runs: list[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each run, after a step with the base asked inside: logits of the adapter, the bare base, the adapter again.

    The base is asked between a forward and its backward, as a reference is.
    """
    from shardwise.nn.adapters.layers import adapter_disabled

    results = []
    for run in runs:
        parts = parts_of(run)
        model, batch = parts.sharded.model, batch_of(parts, 0)
        for index, micro in enumerate(batch.micro_batches):
            parts.sharded.prepare_micro_batch(last=index == len(batch.micro_batches) - 1)
            with torch.no_grad(), adapter_disabled(model):
                parts.objective(model, micro)
            loss = parts.objective(model, micro)
            with torch.no_grad(), adapter_disabled(model):
                parts.objective(model, micro)
            (loss.total / batch.supervised).backward()
        parts.update()
        with parts.sharded.evaluation():
            first = model(input_ids=IDS).logits
            with adapter_disabled(model):
                bare = model(input_ids=IDS).logits
            results.append((first, bare, model(input_ids=IDS).logits))
    return results


def starting_values(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every parameter before the first step."""
    return full_parameters(parts_of(run))
