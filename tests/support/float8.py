"""Functions that the tests of fp8 gathers run on ranks (see ranks.py)."""

from __future__ import annotations

from typing import Any

import torch


def train_and_count(run: dict[str, Any], break_scales: float = 1.0) -> dict[str, Any]:
    """A whole run; what each kind of collective moved in it, and what evaluation measured."""
    from pathlib import Path

    from shardwise.observe.metrics import read_metrics
    from shardwise.parallel.zero.accounting import WireCount
    from support.scenarios import train

    if break_scales != 1.0:
        _break(break_scales)
    with WireCount() as wire:
        losses, norms, final = train(run)
    records = read_metrics(Path(run["output"]) / "metrics.jsonl")
    evaluated = [r["loss"] for r in records if r["kind"] == "eval"]
    return {"losses": losses, "norms": norms, "final": final, "evaluated": evaluated, "bytes": dict(wire.bytes)}


def _break(factor: float) -> None:
    """Scales of a largest value that is a little off, as that of an earlier step would be."""
    from shardwise.parallel.zero import float8_gather as float8

    for name in ("scale_for", "inverse_for"):
        right = getattr(float8, name)
        setattr(float8, name, lambda largest, right=right: right(largest * factor))


def one_step(run: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the gathers of one step and of an evaluation; elements of all weights, of those in fp8, their count."""
    from shardwise.nn.float8_linear import Float8
    from shardwise.parallel.zero.accounting import WireCount
    from shardwise.train.loop import accumulate, evaluate
    from support.scenarios import batch_of, parts_of

    parts = parts_of(run)
    layers = [m for m in parts.sharded.model.modules() if isinstance(m, Float8)]
    eighth = sum(layer.weight.numel() for layer in layers)
    found = {"parameters": parts.job.parameters, "fp8": eighth, "layers": len(layers)}
    for name, do in {"step": lambda: accumulate(parts, batch_of(parts, 0)), "eval": lambda: evaluate(parts)}.items():
        with WireCount() as wire:
            do()
        found[name] = dict(wire.bytes)
        if name == "step":
            parts.update()
    return found


def gathered(run: dict[str, Any]) -> dict[str, Any]:
    """A layer's weight as forwards see it: in training, in an evaluation in the middle of a step, and the shard's."""
    from shardwise.nn.float8_linear import Float8
    from shardwise.train.loop import evaluate
    from support.scenarios import batch_of, full_parameters, parts_of

    parts = parts_of(run)
    whole = full_parameters(parts)
    name, layer = next((n, m) for n, m in parts.sharded.model.named_modules() if isinstance(m, Float8))
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    micro = batch_of(parts, 0).micro_batches[0]
    parts.sharded.prepare_micro_batch(last=False)
    parts.objective(parts.sharded.model, micro).total.backward()
    evaluate(parts)
    return {"training": seen[0], "evaluation": seen[1], "own": whole[f"{name}.weight"]}
