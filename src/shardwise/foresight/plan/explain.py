"""Why a plan is what it is, in sentences with their numbers; and what the field's rules of thumb say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.config.units import human
from shardwise.core.hardware.specs import Cluster
from shardwise.foresight.plan.estimate import Estimate
from shardwise.foresight.plan.network import bus_bandwidth
from shardwise.foresight.plan.quick import Quick, Strategy
from shardwise.foresight.plan.search import Option, Plan

SLOW_LINK = 20e9  # bytes/s per device between nodes, below which they count as thinly connected


def reasons(plan: Plan) -> list[str]:
    """One sentence for each choice of the best option, and one for the next best."""
    if plan.best is None or plan.quick is None:
        return list(_nothing_fits(plan))
    return [*_choices(plan, plan.best, plan.quick), *_alternatives(plan)]


def _choices(plan: Plan, best: Option, quick: Quick) -> Iterator[str]:
    s, found, cluster = best.strategy, best.estimate, plan.cluster
    device = cluster.device.memory
    if cluster.ranks > 1:
        yield _why_stage(s, quick, cluster)
    if s.tensor > 1:
        without = _without("tensor", plan, quick, replace(s, tensor=1))
        inner = f"tensor {s.tensor} stays within a node ({per_second(cluster.within.bandwidth)} each)"
        spent = found.time.model_axes
        yield f"{inner} and costs {spent:.2g} s of a step; without it: {without}."
    if s.pipeline > 1:
        idle = found.time.bubble / found.time.seconds
        without = _without("pipeline", plan, quick, replace(s, pipeline=1, interleaved=False))
        yield f"pipeline {s.pipeline} leaves devices idle {idle:.0%} of a step; without it: {without}."
    if s.context > 1:
        yield (
            f"context {s.context} divides {plan.run.data.sequence_length:,} tokens; without it: "
            f"{_without('context', plan, quick, replace(s, context=1))}."
        )
    if s.expert > 1:
        size = quick.of.sizes.experts * quick.of.sizes.layers
        yield f"expert {s.expert}: {size / 1e9:.0f}B of the parameters are experts'."
    if s.secondary is not None:
        first = bus_bandwidth(cluster.per_node, cluster.nodes, cluster.within, cluster.across)
        near = per_second(cluster.within.bandwidth)
        yield f"hpZ keeps later gathers within the node: {near} instead of {per_second(first)}."
    if s.recompute:
        size = quick.memory(replace(s, recompute=False))
        yield f"recompute: full, because keeping all activations would take about {human(size)} of {human(device)}."
    else:
        yield f"nothing is computed again: {human(device - found.peak)} of {human(device)} stay free."
    if s.offload != "none":
        size = quick.memory(replace(s, offload="none", offload_parameters="none"))
        where = "in the host's memory" if s.offload == "cpu" else "on disk"
        yield (
            f"the optimizer's states are {where} as the last resort: on the device it would take about "
            f"{human(size)}; moving them costs {found.time.offload:.2g} s of each step."
        )


def _why_stage(s: Strategy, quick: Quick, cluster: Cluster) -> str:
    words = f"ZeRO-{s.zero}"
    if s.zero == 0:
        return "no ZeRO: states fit undivided, and nothing has to be gathered."
    less = replace(s, zero=s.zero - 1, shard=s.shard if s.zero > 1 else None, secondary=None)
    size = quick.memory(less)
    lower = f"ZeRO-{s.zero - 1}" if s.zero > 1 else "without ZeRO it"
    if size > cluster.device.memory:
        why = f"{lower} would take about {human(size)} of {human(cluster.device.memory)}"
    else:
        why = f"{lower} would fit too (about {human(size)}), at about {quick.seconds(less):.2f} s a step"
    moved = ""
    if s.zero == 3:
        _, mine = quick.parameters(s)
        passes = (3 if s.recompute else 2) * quick.gathered(s) + 4 * mine * quick.of.sizes.trained
        total = passes * quick.count(s)
        spread = quick.ranks(s)[1]
        near = max(1, min(spread, cluster.per_node // s.tensor))
        rate = bus_bandwidth(near, -(-spread // near), cluster.within, cluster.across)
        spent = f"{per_second(rate)} = {total / rate:.2g} s"
        moved = f"; it moves {total / 1e9:,.0f} GB per step at {spent} beside the computation"
    return f"{words}: {why}{moved}."


def _without(axis: str, plan: Plan, quick: Quick, s: Strategy) -> str:
    """The best that was sketched without an axis; where none was, about what the same without it would take."""
    others = [one for one in plan.options if getattr(one.strategy, axis) == 1]
    if not others:
        return _nearest(quick, s)
    best = min(others, key=lambda one: one.estimate.time.seconds)
    found = best.estimate
    return f"{told(best.strategy)} with {found.time.seconds:.2f} s a step and {human(found.peak)}"


def _nearest(quick: Quick, s: Strategy) -> str:
    """What a strategy would take, with the micro-batch and recomputation that suit it best."""
    per_rank = quick.run.train.batch_size // max(1, quick.ranks(s)[0])
    if per_rank < 1 or quick.run.train.batch_size % quick.ranks(s)[0]:
        return f"a batch of {quick.run.train.batch_size} could not be divided among {quick.ranks(s)[0]} ranks"
    several = [
        replace(s, micro=micro, recompute=again)
        for micro in (1, 2, 4, 8) if per_rank % micro == 0 for again in (False, True)
    ]  # fmt: skip
    fitting = [one for one in several if quick.memory(one) <= quick.cluster.device.memory]
    if not fitting:
        least = min(quick.memory(one) for one in several)
        return f"about {human(least)}, more than there is (all else as it is)"
    best = min(fitting, key=quick.seconds)
    return f"about {quick.seconds(best):.2f} s a step and {human(quick.memory(best))}"


def _alternatives(plan: Plan) -> Iterator[str]:
    best = plan.options[0]
    for other in plan.options[1:2]:
        slower = other.estimate.time.seconds / best.estimate.time.seconds - 1
        less = best.estimate.peak - other.estimate.peak
        size = f"{human(abs(less))} {'less' if less > 0 else 'more'} memory" if abs(less) > 2**20 else "the same memory"
        how = f"{slower:.0%} slower" if slower > 0.005 else "as fast"
        yield f"next best: {told(other.strategy)}: {how}, {size}."


def told(s: Strategy, recompute: str | None = None) -> str:
    """A strategy with its micro-batch, and how much is computed again where that is not all."""
    again = recompute or ("full" if s.recompute else "none")
    return f"{s.name()}, micro-batch {s.micro}{'' if again == 'none' else f', recompute {again}'}"


def _nothing_fits(plan: Plan) -> Iterator[str]:
    if plan.rough and plan.quick is not None and plan.rough[0].offload != "none":
        s = plan.rough[0]
        yield f"nothing fits without offloading; with it, {told(s)} takes ≈ {plan.quick.seconds(s):.0f} s a step."
        return
    yield f"none of {plan.considered:,} strategies fits on {plan.cluster.ranks} × {plan.cluster.device.name}."
    near = min(plan.too_large, key=lambda option: -option.estimate.spare, default=None)
    if near is not None:
        found = near.estimate
        lacking = -found.spare if found.spare < 0 else found.host - plan.cluster.host_memory
        where = "the device's" if found.spare < 0 else "the host's"
        yield f"the nearest, {told(near.strategy)}, lacks {human(lacking)} of {where} memory."


def guidelines(plan: Plan) -> list[tuple[str, str, bool]]:
    """Rules of thumb: what they say, what the plan does and its numbers, and whether the two agree."""
    if plan.best is None or plan.quick is None:
        return []
    s, found, cluster, quick = plan.best.strategy, plan.best.estimate, plan.cluster, plan.quick
    rules: list[tuple[str, str, bool]] = []
    if cluster.nodes > 1:
        thin = cluster.across.bandwidth < SLOW_LINK
        near = s.shard is not None or s.secondary is not None or s.zero < 3
        shown = found.time.data_axis / found.time.seconds
        if thin:
            rule = "between thinly connected nodes, divide within a node (hybrid sharding or hpZ)"
            how = "done" if near and (s.shard or s.secondary) else "not needed"
            here = f"{how}: waiting for ZeRO's communication takes {shown:.0%} of a step"
            rules.append((rule, here, near or shown < 0.1))
        rule = "tensor parallelism within a node"
        rules.append((rule, f"tensor {s.tensor} of {cluster.per_node} devices per node", s.tensor <= cluster.per_node))
    if s.offload != "none":
        rules.append(("offload only as the last resort", "nothing else fits", True))
    if s.pipeline > 1:
        count = found.micro_batches
        rule = "at least four micro-batches per pipeline stage"
        idle = found.time.bubble / found.time.seconds
        rules.append((rule, f"{count} for {s.pipeline} stages: {idle:.0%} idle", count >= 4 * s.pipeline))
    if quick.of.sizes.block * quick.of.sizes.layers < 1e9 and s.tensor > 1:
        rules.append(("small models need no tensor parallelism", f"tensor {s.tensor}", False))
    batch = plan.run.train.batch_size
    if batch >= 256 and plan.run.train.learning_rate <= 2e-5:
        rule = "scale the learning rate with the batch (by its square root with Adam)"
        advice = f"batch {batch} against 32: consider {plan.run.train.learning_rate * (batch / 32) ** 0.5:.1e}"
        rules.append((rule, advice, True))
    return rules


def per_second(rate: float) -> str:
    """A link's bandwidth."""
    return f"{rate / 1e9:,.{0 if rate >= 1e10 else 1}f} GB/s"


def long_time(hours: float) -> str:
    """How long a whole training takes: 40 seconds, 12 minutes, 5.3 hours, 4.1 days."""
    if hours < 1:
        return f"{hours * 3600:.0f} seconds" if hours * 60 < 2 else f"{hours * 60:.0f} minutes"
    return f"{hours:,.1f} hours" if hours < 72 else f"{hours / 24:,.1f} days"


def money(cost: float) -> str:
    """An amount, with hundredths where they matter."""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.2f}"


def headline(found: Estimate) -> str:
    """Time, rate, share of the peak and memory in a line."""
    limit = human(found.cluster.device.memory)
    return (
        f"{found.time.seconds:.2f} s per step, {found.rate:,.0f} tokens/s per device "
        f"({found.rate * found.cluster.ranks:,.0f} in all), {found.mfu:.0%} of the peak, "
        f"{human(found.peak)} of {limit}{', blocks compiled' if found.run.compiled else ''}"
    )
