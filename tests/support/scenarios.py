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


def plain_loop(run: dict[str, Any]) -> list[float]:
    """The same training without any of our engine: full model, plain AdamW, one document after the other."""
    from transformers import AutoModelForCausalLM

    from shardwise.optim.adamw import decay_groups
    from shardwise.optim.schedules import learning_rate

    parts = parts_of(run)
    train, corpus, loader = parts.job.run.train, parts.job.data.train, parts.loader
    model = AutoModelForCausalLM.from_config(parts.job.source.config)
    model.load_state_dict(full_parameters(parts))
    groups = decay_groups(dict(model.named_parameters()), train.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=train.betas, eps=train.eps)
    losses = []
    for step in range(train.steps):
        documents = [d for s in loader.sequences(step * train.batch_size, train.batch_size) for d in s]
        count = sum(int(corpus.supervised[d]) for d in documents)
        total = 0.0
        for document in documents:
            start, stop = int(corpus.starts[document]), int(corpus.starts[document + 1])
            ids = torch.as_tensor(corpus.tokens[start:stop].astype("int64"))[None]
            learned = torch.as_tensor(corpus.learned[start:stop].copy())
            log_p = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            loss = -(log_p.gather(1, ids[0, 1:, None])[:, 0] * learned[1:]).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step, train.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def draw() -> torch.Tensor:
    """What this rank's dropout would draw in step 0."""
    import torch.distributed as dist

    from shardwise.train.loop import seed_step

    seed_step(0, 0, dist.get_rank())
    return torch.rand(8)
