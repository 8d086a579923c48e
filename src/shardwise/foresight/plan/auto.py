"""Answers `parallel: auto` and `recompute: auto` for the machine at hand, with the reasons that are printed."""

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
from shardwise.foresight.plan.explain import headline, reasons, told
from shardwise.foresight.plan.gate import cluster_here
from shardwise.foresight.plan.models import find_config
from shardwise.foresight.plan.quick import Strategy
from shardwise.foresight.plan.search import search
from shardwise.nn.models.adapt import settle_attention


def answered(run: Run, say: Callable[[str], None]) -> Resolution:
    """The run with the best settings that fit here; micro-batch and recomputation that it names are kept.

    Every rank under torchrun comes to the same answer: nothing here depends on the clock.
    """
    for conflict in clashes(run):
        if conflict.field == "recompute":
            raise conflict.error()
    plain = _plain(run)
    settled = resolve_machine(plain)
    source = find_config(plain.model, task_wanted(plain))
    resolve_objective(settled, source.task)
    resolve_model(settled, source.config)
    source = settle_attention(settled, source, lambda _: None)
    cluster = cluster_here(settled.run, world_size(settled.run))
    if cluster is None:
        problem = "this machine's GPU is not in the hardware table"
        raise UserError("parallel", "auto", problem, "run `shardwise bench`, or write the settings yourself")
    parallel, micro, again = run.parallel, run.train.micro_batch_size, run.recompute

    def wanted(s: Strategy) -> bool:
        return (
            (micro == "auto" or s.micro == micro)
            and (again == "auto" or s.recompute == (again == "full"))
            and (parallel.auto or _same(s, parallel))
        )

    say("planning")
    open_run = settled.run.model_copy(update={"compile": settled.run.compile and run.compile})  # a strategy decides
    plan = search(source, open_run, cluster, budget=0.0, pick=wanted, last_resort=parallel.auto)
    if plan.best is None:
        raise UserError("parallel", "auto", reasons(plan)[0], "see `shardwise plan`, or use more or larger devices")
    result = Resolution(run)
    values = run.model_dump()
    for path, value in plan.best.strategy.settings().items():
        place(values, path, value)
    values["parallel"]["auto"] = False
    best, blocks = plan.best.estimate, None
    if again == "light":
        values["recompute"] = "light"
    if again == "auto" and best.run.recompute == "full":
        say("planning how much to recompute")
        best, blocks = fewest_recomputed(source, best)
        values |= {"recompute": best.run.recompute, "recompute_blocks": blocks}
    result.run = Run.model_validate(values)
    some = f", of the first {blocks} blocks" if blocks is not None else ""
    why = f"{told(plan.best.strategy, values['recompute'])}{some}: {headline(best)}"
    result.reasons["parallel" if parallel.auto else "recompute"] = why
    for line in (why, *reasons(plan)):
        say(line)
    return result


def _plain(run: Run) -> Run:
    """The run with nothing left open that the planner answers."""
    values = run.model_dump()
    if run.parallel.auto:
        values["parallel"] = {}
    values |= {"recompute": "none", "recompute_blocks": None, "recompute_group": 1}
    values["recompute_attention"] = True
    values["offload"] |= {"activations": "none", "activation_blocks": None}
    return Run.model_validate(values)


def _same(s: Strategy, parallel: Parallel) -> bool:
    axes = ("zero", "tensor", "context", "pipeline", "expert")
    return all(getattr(s, axis) == getattr(parallel, axis) for axis in axes) and s.shard == parallel.dp_shard_size
