"""What each technique buys for this model on this cluster, by rough scores: one by one, and against the choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pydantic import ValidationError

from shardwise.core.errors import UserError
from shardwise.foresight.plan.quick import Quick, Strategy
from shardwise.foresight.plan.search import Plan
from shardwise.foresight.plan.strategies import applied, legal


@dataclass(frozen=True)
class Rung:
    """A technique and the strategy that has it, or why there is none."""

    name: str
    strategy: Strategy
    problem: str | None = None


def ladder(plan: Plan, chosen: Strategy) -> list[Rung]:
    """From plain data parallelism to the chosen strategy, one technique at a time; what cannot be here is left out."""
    spread = plan.cluster.ranks // (chosen.tensor * chosen.pipeline)
    at = Strategy(0 if spread > 1 else chosen.zero)
    rungs = [Rung("plain data parallel" if plan.cluster.ranks > 1 else "as it is", at)]
    for name, changes in _techniques(chosen, at.zero):
        at = replace(at, **changes)  # type: ignore[arg-type]
        rungs.append(Rung(name, at))
    return [rung for rung in (_checked(plan, rung) for rung in rungs) if rung.problem is None]


def _techniques(chosen: Strategy, begin: int) -> Iterator[tuple[str, dict[str, object]]]:
    what = {1: "optimizer", 2: "gradients", 3: "weights"}
    for zero in range(begin + 1, chosen.zero + 1):
        yield f"+ ZeRO-{zero}: {what[zero]} divided", {"zero": zero}
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


def variants(plan: Plan, chosen: Strategy) -> list[Rung]:
    """The chosen strategy with one thing changed; those that cannot be say why."""
    return [_checked(plan, rung) for rung in _variants(plan, chosen)]


def _variants(plan: Plan, s: Strategy) -> Iterator[Rung]:
    cluster = plan.cluster
    yield Rung("recompute off" if s.recompute else "recompute full", replace(s, recompute=not s.recompute))
    if cluster.ranks // (s.tensor * s.pipeline) > 1:
        for zero in (z for z in range(4) if z != s.zero):
            yield Rung(f"ZeRO-{zero}" if zero else "replicated (no ZeRO)", at_stage(s, zero))
    yield Rung(f"micro-batch {s.micro * 2}", replace(s, micro=s.micro * 2))
    if s.micro % 2 == 0:
        yield Rung(f"micro-batch {s.micro // 2}", replace(s, micro=s.micro // 2))
    for tensor in (1, 2, 4, 8):
        if tensor != s.tensor and tensor <= cluster.per_node:
            plain = replace(s, shard=None, secondary=None)  # groups are of the ranks that tensor leaves
            yield Rung(f"tensor {tensor}" if tensor > 1 else "without tensor", replace(plain, tensor=tensor))
    near = cluster.per_node // s.tensor
    if cluster.nodes > 1 and near > 1:
        sharded = at_stage(s, max(2, s.zero))
        if s.shard is None:
            yield Rung(f"hybrid: groups of {near}", replace(sharded, shard=near, secondary=None))
        else:
            yield Rung("divided over all ranks", replace(s, shard=None))
        if s.secondary is None:
            yield Rung(f"hpZ {near}", replace(at_stage(s, 3), shard=None, secondary=near))
        else:
            yield Rung("without hpZ", replace(s, secondary=None))
    if s.offload == "none":
        yield Rung("optimizer on cpu", replace(at_stage(s, max(2, s.zero)), offload="cpu"))
        both = replace(at_stage(s, 3), offload="cpu", offload_parameters="cpu")
        yield Rung("optimizer and weights on cpu", both)
    else:
        yield Rung("without offload", replace(s, offload="none", offload_parameters="none"))


def at_stage(s: Strategy, zero: int) -> Strategy:
    """The strategy at another stage, without what that stage does not have."""
    return replace(
        s, zero=zero, shard=s.shard if zero >= 2 else None, secondary=s.secondary if zero == 3 else None,
        offload=s.offload if zero >= 2 else "none", offload_parameters=s.offload_parameters if zero == 3 else "none",
    )  # fmt: skip


def _checked(plan: Plan, rung: Rung) -> Rung:
    assert plan.quick is not None
    return replace(rung, problem=_problem(plan, plan.quick, rung.strategy))


def _problem(plan: Plan, quick: Quick, s: Strategy) -> str | None:
    ranks, batch = plan.cluster.ranks, plan.run.train.batch_size
    if ranks % (s.tensor * s.context * s.pipeline):
        return f"{ranks} devices cannot be divided so"
    data = quick.ranks(s)[0]
    if batch % data:
        return f"a batch of {batch} cannot be divided among {data} ranks"
    if (batch // data) % s.micro:
        each = batch // data
        return f"a rank has {each} sequence{'s' if each > 1 else ''} a step"
    if s.pipeline > 1 and batch // data // s.micro < s.pipeline:
        return "fewer micro-batches than stages"
    try:
        found = legal(applied(plan.run, s), plan.source.config, ranks)
    except (UserError, ValidationError) as error:
        found = str(error)
    return None if found is None else found.strip().splitlines()[0]
