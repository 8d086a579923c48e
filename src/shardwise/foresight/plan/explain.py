"""Explains a plan in sentences with numbers, and compares it with the field's rules of thumb."""

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
    """Returns one sentence for each choice of the best option, and one for the runner-up."""
    if plan.best is None or plan.quick is None:
        return list(_nothing_fits(plan))
    return [*_choices(plan, plan.best, plan.quick), *_alternatives(plan)]


def _choices(plan: Plan, best: Option, quick: Quick) -> Iterator[str]:
    chosen = best.strategy
    estimate = best.estimate
    cluster = plan.cluster
    device_memory = cluster.device.memory
    if cluster.ranks > 1:
        yield _why_stage(chosen, quick, cluster)
    if chosen.tensor > 1:
        without = _without("tensor", plan, quick, replace(chosen, tensor=1))
        where_tensor = f"tensor {chosen.tensor} stays within a node ({per_second(cluster.within.bandwidth)} each)"
        spent = estimate.time.model_axes
        yield f"{where_tensor} and costs {spent:.2g} s of a step; without it: {without}."
    if chosen.pipeline > 1:
        idle = estimate.time.bubble / estimate.time.seconds
        without = _without("pipeline", plan, quick, replace(chosen, pipeline=1, interleaved=False))
        yield f"pipeline {chosen.pipeline} leaves devices idle {idle:.0%} of a step; without it: {without}."
    if chosen.context > 1:
        yield (
            f"context {chosen.context} divides {plan.run.data.sequence_length:,} tokens; without it: "
            f"{_without('context', plan, quick, replace(chosen, context=1))}."
        )
    if chosen.expert > 1:
        size = quick.of.sizes.experts * quick.of.sizes.layers
        yield f"expert {chosen.expert}: {size / 1e9:.0f}B of the parameters are experts'."
    if chosen.secondary is not None:
        ring_bandwidth = bus_bandwidth(cluster.per_node, cluster.nodes, cluster.within, cluster.across)
        node_bandwidth = per_second(cluster.within.bandwidth)
        yield f"hpZ keeps later gathers within the node: {node_bandwidth} instead of {per_second(ring_bandwidth)}."
    if chosen.recompute:
        size = quick.memory(replace(chosen, recompute=False))
        yield (
            "recompute: full, because keeping all activations would take about "
            f"{human(size)} of {human(device_memory)}."
        )
    else:
        yield f"nothing is computed again: {human(device_memory - estimate.peak)} of {human(device_memory)} stay free."
    if chosen.offload != "none":
        size = quick.memory(replace(chosen, offload="none", offload_parameters="none"))
        where = "in the host's memory" if chosen.offload == "cpu" else "on disk"
        yield (
            f"the optimizer's states are {where} as the last resort: on the device it would take about "
            f"{human(size)}; moving them costs {estimate.time.offload:.2g} s of each step."
        )


def _why_stage(chosen: Strategy, quick: Quick, cluster: Cluster) -> str:
    stage = f"ZeRO-{chosen.zero}"
    if chosen.zero == 0:
        return "no ZeRO: states fit undivided, and nothing has to be gathered."
    one_stage_lower = replace(
        chosen, zero=chosen.zero - 1, shard=chosen.shard if chosen.zero > 1 else None, secondary=None
    )
    size = quick.memory(one_stage_lower)
    lower = f"ZeRO-{chosen.zero - 1}" if chosen.zero > 1 else "without ZeRO it"
    if size > cluster.device.memory:
        comparison = f"{lower} would take about {human(size)} of {human(cluster.device.memory)}"
    else:
        comparison = (
            f"{lower} would fit too (about {human(size)}), at about {quick.seconds(one_stage_lower):.2f} s a step"
        )
    traffic = ""
    if chosen.zero == 3:
        _, rank_parameters = quick.parameters(chosen)
        passes = (3 if chosen.recompute else 2) * quick.gathered(chosen) + 4 * rank_parameters * quick.of.sizes.trained
        total = passes * quick.count(chosen)
        shard_ranks = quick.ranks(chosen)[1]
        per_node = max(1, min(shard_ranks, cluster.per_node // chosen.tensor))
        rate = bus_bandwidth(per_node, -(-shard_ranks // per_node), cluster.within, cluster.across)
        spent = f"{per_second(rate)} = {total / rate:.2g} s"
        traffic = f"; it moves {total / 1e9:,.0f} GB per step at {spent} beside the computation"
    return f"{stage}: {comparison}{traffic}."


def _without(axis: str, plan: Plan, quick: Quick, strategy: Strategy) -> str:
    """The best sketched strategy without an axis; if none was sketched, a rough score of this one without it."""
    others = [option for option in plan.options if getattr(option.strategy, axis) == 1]
    if not others:
        return _nearest(quick, strategy)
    best = min(others, key=lambda option: option.estimate.time.seconds)
    estimate = best.estimate
    return f"{describe(best.strategy)} with {estimate.time.seconds:.2f} s a step and {human(estimate.peak)}"


def _nearest(quick: Quick, strategy: Strategy) -> str:
    """What a strategy would take, with the best micro-batch and recomputation for it."""
    per_rank = quick.run.train.batch_size // max(1, quick.ranks(strategy)[0])
    if per_rank < 1 or quick.run.train.batch_size % quick.ranks(strategy)[0]:
        return f"a batch of {quick.run.train.batch_size} could not be divided among {quick.ranks(strategy)[0]} ranks"
    candidates = [
        replace(strategy, micro=micro, recompute=recompute)
        for micro in (1, 2, 4, 8) if per_rank % micro == 0 for recompute in (False, True)
    ]  # fmt: skip
    fitting = [candidate for candidate in candidates if quick.memory(candidate) <= quick.cluster.device.memory]
    if not fitting:
        smallest = min(quick.memory(candidate) for candidate in candidates)
        return f"about {human(smallest)}, more than there is (all else as it is)"
    best = min(fitting, key=quick.seconds)
    return f"about {quick.seconds(best):.2f} s a step and {human(quick.memory(best))}"


def _alternatives(plan: Plan) -> Iterator[str]:
    best = plan.options[0]
    for other in plan.options[1:2]:
        slower = other.estimate.time.seconds / best.estimate.time.seconds - 1
        memory_saved = best.estimate.peak - other.estimate.peak
        size = (
            f"{human(abs(memory_saved))} {'less' if memory_saved > 0 else 'more'} memory"
            if abs(memory_saved) > 2**20
            else "the same memory"
        )
        speed = f"{slower:.0%} slower" if slower > 0.005 else "as fast"
        yield f"next best: {describe(other.strategy)}: {speed}, {size}."


def describe(strategy: Strategy, recompute: str | None = None) -> str:
    """Returns the strategy's name with micro-batch and recomputation."""
    mode = recompute or ("full" if strategy.recompute else "none")
    return f"{strategy.name()}, micro-batch {strategy.micro}{'' if mode == 'none' else f', recompute {mode}'}"


def _nothing_fits(plan: Plan) -> Iterator[str]:
    if plan.rough and plan.quick is not None and plan.rough[0].offload != "none":
        strategy = plan.rough[0]
        seconds = plan.quick.seconds(strategy)
        yield f"nothing fits without offloading; with it, {describe(strategy)} takes ≈ {seconds:.0f} s a step."
        return
    yield f"none of {plan.considered:,} strategies fits on {plan.cluster.ranks} × {plan.cluster.device.name}."
    nearest = min(plan.too_large, key=lambda option: -option.estimate.spare, default=None)
    if nearest is not None:
        estimate = nearest.estimate
        missing = -estimate.spare if estimate.spare < 0 else estimate.host - plan.cluster.host_memory
        where = "the device's" if estimate.spare < 0 else "the host's"
        yield f"the nearest, {describe(nearest.strategy)}, lacks {human(missing)} of {where} memory."


def guidelines(plan: Plan) -> list[tuple[str, str, bool]]:
    """Returns rules of thumb as (rule, what the plan does, whether they agree)."""
    if plan.best is None or plan.quick is None:
        return []
    chosen = plan.best.strategy
    estimate = plan.best.estimate
    cluster = plan.cluster
    quick = plan.quick
    rules: list[tuple[str, str, bool]] = []
    if cluster.nodes > 1:
        slow_network = cluster.across.bandwidth < SLOW_LINK
        shards_in_node = chosen.shard is not None or chosen.secondary is not None or chosen.zero < 3
        exposed = estimate.time.data_axis / estimate.time.seconds
        if slow_network:
            rule = "between thinly connected nodes, divide within a node (hybrid sharding or hpZ)"
            verdict = "done" if shards_in_node and (chosen.shard or chosen.secondary) else "not needed"
            observed = f"{verdict}: waiting for ZeRO's communication takes {exposed:.0%} of a step"
            rules.append((rule, observed, shards_in_node or exposed < 0.1))
        rule = "tensor parallelism within a node"
        rules.append(
            (rule, f"tensor {chosen.tensor} of {cluster.per_node} devices per node", chosen.tensor <= cluster.per_node)
        )
    if chosen.offload != "none":
        rules.append(("offload only as the last resort", "nothing else fits", True))
    if chosen.pipeline > 1:
        count = estimate.micro_batches
        rule = "at least four micro-batches per pipeline stage"
        idle = estimate.time.bubble / estimate.time.seconds
        rules.append((rule, f"{count} for {chosen.pipeline} stages: {idle:.0%} idle", count >= 4 * chosen.pipeline))
    if quick.of.sizes.block * quick.of.sizes.layers < 1e9 and chosen.tensor > 1:
        rules.append(("small models need no tensor parallelism", f"tensor {chosen.tensor}", False))
    batch = plan.run.train.batch_size
    if batch >= 256 and plan.run.train.learning_rate <= 2e-5:
        rule = "scale the learning rate with the batch (by its square root with Adam)"
        advice = f"batch {batch} against 32: consider {plan.run.train.learning_rate * (batch / 32) ** 0.5:.1e}"
        rules.append((rule, advice, True))
    return rules


def per_second(rate: float) -> str:
    """Formats a link's bandwidth in GB/s."""
    return f"{rate / 1e9:,.{0 if rate >= 1e10 else 1}f} GB/s"


def long_time(hours: float) -> str:
    """Formats a training time: 40 seconds, 12 minutes, 5.3 hours, 4.1 days."""
    if hours < 1:
        return f"{hours * 3600:.0f} seconds" if hours * 60 < 2 else f"{hours * 60:.0f} minutes"
    return f"{hours:,.1f} hours" if hours < 72 else f"{hours / 24:,.1f} days"


def money(cost: float) -> str:
    """Formats an amount, with cents below 100."""
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.2f}"


def headline(estimate: Estimate) -> str:
    """Returns step time, throughput, MFU and memory in one line."""
    limit = human(estimate.cluster.device.memory)
    return (
        f"{estimate.time.seconds:.2f} s per step, {estimate.rate:,.0f} tokens/s per device "
        f"({estimate.rate * estimate.cluster.ranks:,.0f} in all), {estimate.mfu:.0%} of the peak, "
        f"{human(estimate.peak)} of {limit}{', blocks compiled' if estimate.run.compiled else ''}"
    )
