"""Steps with compiled blocks, and what the compiler could not take."""

from __future__ import annotations

from typing import Any


def steps_compiled(run: dict[str, Any]) -> tuple[list[float], dict[str, int]]:
    """Gradient norms of two steps, and why graphs were broken, counted."""
    import torch
    from torch._dynamo.utils import counters

    from shardwise.config.schema import Run
    from shardwise.distributed.mesh import init_world
    from shardwise.foresight.bench.train import give_values
    from shardwise.foresight.rehearse.batch import step_batch
    from shardwise.foresight.rehearse.step import set_up
    from shardwise.nn.models.source import ModelSource, config_from
    from shardwise.train.loop import accumulate

    plain = torch.compile
    torch.compile = lambda f, backend=None: plain(f, backend="aot_eager")  # type: ignore[assignment, misc]
    found = Run.model_validate(run)
    source = ModelSource("tiny", config_from(dict(run["model"]["config"])), None, "none", task="causal")
    parts, _ = set_up(source, found, init_world(found), None)
    torch.manual_seed(0)
    give_values(parts.sharded.model)
    norms = []
    for _ in range(2):
        batch = step_batch(found, 1)
        for micro in batch.micro_batches:
            micro.input_ids.random_(0, 100)
        accumulate(parts, batch)
        norms.append(float(parts.update()))
    return norms, {str(reason)[:200]: count for reason, count in counters["graph_break"].items()}
