"""What each technique contributes for this model on this cluster, by rough scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import ValidationError

from shardwise.core.errors import UserError
from shardwise.foresight.plan.quick import Quick, Strategy
from shardwise.foresight.plan.search import Plan
from shardwise.foresight.plan.strategies import applied, legal


@dataclass(frozen=True)
class TechniqueStep:
    """A technique with the strategy that uses it, or the reason why it cannot be used."""

    name: str
    strategy: Strategy
    problem: str | None = None


def technique_steps(plan: Plan, chosen: Strategy) -> list[TechniqueStep]:
    """Returns the steps from plain data parallelism to the chosen strategy, one technique at a time.

    Techniques that cannot be used here are dropped.
    """
    shard_ranks = plan.cluster.ranks // (chosen.tensor * chosen.pipeline)
    strategy = Strategy(0 if shard_ranks > 1 else chosen.zero)
    steps = [TechniqueStep("plain data parallel" if plan.cluster.ranks > 1 else "as it is", strategy)]
    for name, changes in _techniques(chosen, strategy.zero):
        strategy = replace(strategy, **changes)  # type: ignore[arg-type]
        steps.append(TechniqueStep(name, strategy))
    checked = [_checked(plan, step) for step in steps]
    return [step for step in checked if step.problem is None]


def _techniques(chosen: Strategy, first: int) -> Iterator[tuple[str, dict[str, object]]]:
    sharded = {1: "optimizer", 2: "gradients", 3: "weights"}
    for zero in range(first + 1, chosen.zero + 1):
        yield f"+ ZeRO-{zero}: {sharded[zero]} divided", {"zero": zero}
    if chosen.recompute:
        yield "+ recompute", {"recompute": True}
    for axis in ("tensor", "context", "expert", "pipeline"):
        size = getattr(chosen, axis)
        if size > 1:
            yield f"+ {axis} {size}", {axis: size}
    if chosen.interleaved:
        yield "+ interleaved stages", {"interleaved": True}
    if chosen.shard is not None:
        yield f"+ groups of {chosen.shard}", {"shard": chosen.shard}
    if chosen.secondary is not None:
        yield f"+ hpZ {chosen.secondary}", {"secondary": chosen.secondary}
    if chosen.micro > 1:
        yield f"+ micro-batch {chosen.micro}", {"micro": chosen.micro}
    if chosen.offload != "none":
        yield f"+ optimizer on {chosen.offload}", {"offload": chosen.offload}
    if chosen.offload_parameters != "none":
        yield f"+ weights on {chosen.offload_parameters}", {"offload_parameters": chosen.offload_parameters}


def variants(plan: Plan, chosen: Strategy) -> list[TechniqueStep]:
    """Returns the chosen strategy with one thing changed at a time; those that cannot run say why."""
    return [_checked(plan, step) for step in _variants(plan, chosen)]


def _variants(plan: Plan, chosen: Strategy) -> Iterator[TechniqueStep]:
    cluster = plan.cluster
    yield TechniqueStep(
        "recompute off" if chosen.recompute else "recompute full", replace(chosen, recompute=not chosen.recompute)
    )
    if cluster.ranks // (chosen.tensor * chosen.pipeline) > 1:
        for zero in (z for z in range(4) if z != chosen.zero):
            yield TechniqueStep(f"ZeRO-{zero}" if zero else "replicated (no ZeRO)", at_stage(chosen, zero))
    yield TechniqueStep(f"micro-batch {chosen.micro * 2}", replace(chosen, micro=chosen.micro * 2))
    if chosen.micro % 2 == 0:
        yield TechniqueStep(f"micro-batch {chosen.micro // 2}", replace(chosen, micro=chosen.micro // 2))
    for tensor in (1, 2, 4, 8):
        if tensor != chosen.tensor and tensor <= cluster.per_node:
            unsharded = replace(chosen, shard=None, secondary=None)  # groups are of the ranks that tensor leaves
            yield TechniqueStep(
                f"tensor {tensor}" if tensor > 1 else "without tensor", replace(unsharded, tensor=tensor)
            )
    per_node = cluster.per_node // chosen.tensor
    if cluster.nodes > 1 and per_node > 1:
        sharded = at_stage(chosen, max(2, chosen.zero))
        if chosen.shard is None:
            yield TechniqueStep(f"hybrid: groups of {per_node}", replace(sharded, shard=per_node, secondary=None))
        else:
            yield TechniqueStep("divided over all ranks", replace(chosen, shard=None))
        if chosen.secondary is None:
            yield TechniqueStep(f"hpZ {per_node}", replace(at_stage(chosen, 3), shard=None, secondary=per_node))
        else:
            yield TechniqueStep("without hpZ", replace(chosen, secondary=None))
    if chosen.offload == "none":
        yield TechniqueStep("optimizer on cpu", replace(at_stage(chosen, max(2, chosen.zero)), offload="cpu"))
        both = replace(at_stage(chosen, 3), offload="cpu", offload_parameters="cpu")
        yield TechniqueStep("optimizer and weights on cpu", both)
    else:
        yield TechniqueStep("without offload", replace(chosen, offload="none", offload_parameters="none"))


def at_stage(strategy: Strategy, zero: int) -> Strategy:
    """Returns the strategy at another ZeRO stage, without settings which that stage does not support."""
    return replace(
        strategy,
        zero=zero,
        shard=strategy.shard if zero >= 2 else None,
        secondary=strategy.secondary if zero == 3 else None,
        offload=strategy.offload if zero >= 2 else "none",
        offload_parameters=strategy.offload_parameters if zero == 3 else "none",
    )


def _checked(plan: Plan, step: TechniqueStep) -> TechniqueStep:
    assert plan.quick is not None
    return replace(step, problem=_problem(plan, plan.quick, step.strategy))


def _problem(plan: Plan, quick: Quick, strategy: Strategy) -> str | None:
    ranks = plan.cluster.ranks
    batch = plan.run.train.batch_size
    if ranks % (strategy.tensor * strategy.context * strategy.pipeline):
        return f"{ranks} devices cannot be divided so"
    data = quick.ranks(strategy)[0]
    if batch % data:
        return f"a batch of {batch} cannot be divided among {data} ranks"
    if (batch // data) % strategy.micro:
        per_rank = batch // data
        return f"a rank has {per_rank} sequence{'s' if per_rank > 1 else ''} a step"
    if strategy.pipeline > 1 and batch // data // strategy.micro < strategy.pipeline:
        return "fewer micro-batches than stages"
    try:
        problem = legal(applied(plan.run, strategy), plan.source.config, ranks)
    except (UserError, ValidationError) as error:
        problem = str(error)
    return None if problem is None else problem.strip().splitlines()[0]
