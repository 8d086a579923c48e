"""Enumerates the strategies that a model and a cluster allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from shardwise.config.axes import EXPERTS, HEADS, LAYERS, check_axes, check_model_axes, divisors_of, first_of
from shardwise.config.combinations import first_clash
from shardwise.config.paths import place
from shardwise.config.resolve import Machine, check_parallel, compile_here
from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.core.hardware.specs import Cluster
from shardwise.foresight.plan.quick import Strategy

LONG = 16384  # tokens from which a sequence may be worth dividing
MOST_MICRO = 64


@dataclass(frozen=True)
class _Limits:
    """What limits the size of the parallel axes: of the model, the run and the cluster."""

    ranks: int
    per_node: int
    heads: int | None
    key_value_heads: int | None
    layers: int
    experts: int | None
    long_context: bool


def _tensor(size: int, limits: _Limits) -> bool:
    heads = limits.heads
    groups = limits.key_value_heads
    if size > limits.per_node or limits.ranks % size or not heads or heads % size:
        return False
    return not groups or groups % size == 0 or size % groups == 0


def _context(size: int, limits: _Limits) -> bool:
    return limits.long_context


def _pipeline(size: int, limits: _Limits) -> bool:
    return limits.ranks % size == 0 and size <= limits.layers


def _expert(size: int, limits: _Limits) -> bool:
    return bool(limits.experts) and limits.experts % size == 0  # type: ignore[operator]


# Sizes above 1 to try along each axis, and which of them the model and the cluster allow.
AXES: dict[str, tuple[tuple[int, ...], Callable[[int, _Limits], bool]]] = {
    "tensor": ((2, 4, 8), _tensor),
    "context": ((2, 4, 8, 16), _context),
    "pipeline": ((2, 4, 8, 16, 32), _pipeline),
    "expert": ((2, 4, 8, 16, 32, 64), _expert),
}


def enumerate_strategies(config: Any, run: Run, cluster: Cluster, offload: bool = False) -> Iterator[Strategy]:
    """Yields every strategy; with `offload`, only those that keep states off the device, for when nothing else fits."""
    limits = _limits(config, run, cluster)
    undivided = ("tensor", "context", "pipeline") if offload or cluster.ranks == 1 else ()
    candidates = []
    for axis, (sizes, allowed) in AXES.items():
        larger = [] if axis in undivided else [size for size in sizes if allowed(size, limits)]
        candidates.append([1, *larger])
    for tensor, context, pipeline, expert in product(*candidates):
        yield from _with_axes(
            Strategy(0, None, None, tensor, context, pipeline, False, expert), run, cluster, limits, offload
        )


def _limits(config: Any, run: Run, cluster: Cluster) -> _Limits:
    text = config.get_text_config(decoder=True)
    heads = first_of(text, HEADS)
    return _Limits(
        ranks=cluster.ranks,
        per_node=cluster.per_node,
        heads=heads,
        key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        layers=first_of(text, LAYERS) or 0,
        experts=first_of(text, EXPERTS),
        long_context=run.data.sequence_length >= LONG and not config.is_encoder_decoder,
    )


def _with_axes(axes: Strategy, run: Run, cluster: Cluster, limits: _Limits, offload: bool) -> Iterator[Strategy]:
    """Every sharding, micro-batch, recomputation, schedule and offload for the given sizes of the axes."""
    ranks = limits.ranks
    inner = axes.tensor * axes.context * axes.pipeline
    if inner > ranks or ranks % inner or (ranks // axes.pipeline) % axes.expert:
        return
    data = ranks // inner
    if run.train.batch_size % data:
        return
    per_rank = run.train.batch_size // data
    micros = [m for m in divisors_of(per_rank) if m <= MOST_MICRO and (m & (m - 1) == 0 or m == per_rank)]
    interleaves = axes.pipeline > 1 and limits.layers >= 2 * axes.pipeline
    schedules = (False, True) if interleaves else (False,)
    shard_ranks = ranks // (axes.tensor * axes.pipeline)
    shardings = list(_shardings(shard_ranks, limits.per_node // axes.tensor, cluster.nodes, inner, offload))
    for (zero, shard, secondary), micro, recompute in product(shardings, micros, (False, True)):
        if axes.pipeline > 1 and per_rank // micro < axes.pipeline:
            continue
        sharded = replace(axes, zero=zero, shard=shard, secondary=secondary, micro=micro, recompute=recompute)
        for interleaved, (optimizer, parameters) in product(schedules, _offloads(sharded, run, offload)):
            yield replace(
                sharded,
                interleaved=interleaved,
                offload=optimizer,
                offload_parameters=parameters,
                alone=ranks == 1,
            )


def _offloads(strategy: Strategy, run: Run, offload: bool) -> list[tuple[str, str]]:
    """Where optimizer states and weights may be kept."""
    if not offload:
        return [("none", "none")]
    hybrid = strategy.shard is not None or strategy.secondary is not None
    if strategy.zero < 2 or run.method.type != "full" or hybrid:
        return []
    if strategy.zero == 2:
        return [("cpu", "none"), ("disk", "none")]
    return [("cpu", "none"), ("cpu", "cpu"), ("disk", "none"), ("disk", "disk")]


def _shardings(
    ranks: int, per_node: int, nodes: int, inner: int, offload: bool
) -> Iterator[tuple[int, int | None, int | None]]:
    """ZeRO stage, hybrid sharding group and hpZ secondary shard; `per_node` of the ranks are in one node."""
    if ranks == 1:
        yield 2, None, None  # one rank has nothing to divide: the default
        if offload:
            yield 3, None, None  # what weights are kept elsewhere with
        return
    for zero in (0, 1, 2, 3):
        yield zero, None, None
        if zero >= 2 and nodes > 1 and 1 < per_node < ranks and ranks % per_node == 0:
            yield zero, per_node, None
            if zero == 3 and inner == 1:
                yield zero, None, per_node


def applied(run: Run, strategy: Strategy) -> Run:
    """Returns the run with a strategy's settings."""
    values = run.model_dump()
    for name in ("dp_shard_size", "hpz_size", "virtual_stages"):
        values["parallel"][name] = None
    values["parallel"] |= {"bucket": "auto", "prefetch": "auto"}
    values["parallel"] |= {"tensor": 1, "context": 1, "pipeline": 1, "expert": 1, "pipeline_schedule": "1f1b"}
    values["offload"] |= {"optimizer": "none", "parameters": "none"}
    for path, value in strategy.settings().items():
        place(values, path, value)
    if not strategy.recompute:  # what is said of recomputed blocks says nothing then
        values |= {"recompute_blocks": None, "recompute_group": 1, "recompute_attention": True}
        values["offload"] |= {"activations": "none", "activation_blocks": None}
    changed = Run.model_validate(values)
    compiles = compile_here(changed, Machine(1))[0] if changed.compile == "auto" else changed.compile
    return changed.model_copy(update={"compile": compiles})


def legal(run: Run, config: Any, ranks: int) -> str | None:
    """Returns why a run is not possible; None if it is."""
    try:
        check_axes(run, ranks)
        first_clash(run)
        check_parallel(run, ranks)
        check_model_axes(run, config, ranks)
    except UserError as error:
        return str(error)
    return None
