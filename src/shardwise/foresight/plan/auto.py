"""Resolves `parallel: auto` and `recompute: auto` for the machine at hand, and reports the reasons."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.config.combinations import clashes
from shardwise.config.paths import place
from shardwise.config.resolve import (
    Resolution,
    resolve_machine,
    resolve_model,
    resolve_objective,
    task_wanted,
    world_size,
)
from shardwise.config.schema import Parallel, Run
from shardwise.core.errors import UserError
from shardwise.foresight.plan.blocks import fewest_recomputed
from shardwise.foresight.plan.explain import describe, headline, reasons
from shardwise.foresight.plan.gate import cluster_here
from shardwise.foresight.plan.models import find_config
from shardwise.foresight.plan.quick import Strategy
from shardwise.foresight.plan.search import search
from shardwise.nn.models.adapt import settle_attention


def answered(run: Run, say: Callable[[str], None]) -> Resolution:
    """Returns the run with the fastest settings that fit this machine.

    Micro-batch size and recomputation that the run sets are kept.

    Every rank under torchrun comes to the same answer: nothing here depends on the clock.
    """
    for conflict in clashes(run):
        if conflict.field == "recompute":
            raise conflict.error()
    closed_run = _without_open_settings(run)
    settled = resolve_machine(closed_run)
    source = find_config(closed_run.model, task_wanted(closed_run))
    resolve_objective(settled, source.task)
    resolve_model(settled, source.config)
    source = settle_attention(settled, source, lambda _: None)
    cluster = cluster_here(settled.run, world_size(settled.run))
    if cluster is None:
        problem = "this machine's GPU is not in the hardware table"
        raise UserError("parallel", "auto", problem, "run `shardwise bench`, or write the settings yourself")
    parallel = run.parallel
    micro = run.train.micro_batch_size
    recompute = run.recompute

    def matches_run(s: Strategy) -> bool:
        return (
            (micro == "auto" or s.micro == micro)
            and (recompute == "auto" or s.recompute == (recompute == "full"))
            and (parallel.auto or _same_axes(s, parallel))
        )

    say("planning")
    open_run = settled.run.model_copy(update={"compile": settled.run.compile and run.compile})  # a strategy decides
    plan = search(source, open_run, cluster, budget=0.0, pick=matches_run, last_resort=parallel.auto)
    if plan.best is None:
        raise UserError("parallel", "auto", reasons(plan)[0], "see `shardwise plan`, or use more or larger devices")
    result = Resolution(run)
    values = run.model_dump()
    for path, value in plan.best.strategy.settings().items():
        place(values, path, value)
    values["parallel"]["auto"] = False
    best = plan.best.estimate
    blocks = None
    if recompute == "light":
        values["recompute"] = "light"
    if recompute == "auto" and best.run.recompute == "full":
        say("planning how much to recompute")
        best, blocks = fewest_recomputed(source, best)
        values |= {"recompute": best.run.recompute, "recompute_blocks": blocks}
    result.run = Run.model_validate(values)
    first_blocks = f", of the first {blocks} blocks" if blocks is not None else ""
    summary = f"{describe(plan.best.strategy, values['recompute'])}{first_blocks}: {headline(best)}"
    result.reasons["parallel" if parallel.auto else "recompute"] = summary
    for line in (summary, *reasons(plan)):
        say(line)
    return result


def _without_open_settings(run: Run) -> Run:
    """The run with defaults in place of every setting that the planner resolves."""
    values = run.model_dump()
    if run.parallel.auto:
        values["parallel"] = {}
    values |= {"recompute": "none", "recompute_blocks": None, "recompute_group": 1}
    values["recompute_attention"] = True
    values["offload"] |= {"activations": "none", "activation_blocks": None}
    return Run.model_validate(values)


def _same_axes(strategy: Strategy, parallel: Parallel) -> bool:
    axes = ("zero", "tensor", "context", "pipeline", "expert")
    return (
        all(getattr(strategy, axis) == getattr(parallel, axis) for axis in axes)
        and strategy.shard == parallel.dp_shard_size
    )
