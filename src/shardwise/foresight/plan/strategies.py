"""Every way to spread a run over a cluster that its model and the cluster allow."""

from __future__ import annotations

from collections.abc import Iterator
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
MOST_STAGES = 32
MOST_MICRO = 64


def enumerate_strategies(config: Any, run: Run, cluster: Cluster, offload: bool = False) -> Iterator[Strategy]:
    """All of them; with `offload`, those that keep states off the device, which are for when nothing else fits."""
    text = config.get_text_config(decoder=True)
    heads, layers, experts = (first_of(text, names) for names in (HEADS, LAYERS, EXPERTS))
    groups = getattr(text, "num_key_value_heads", None) or heads
    ranks, per_node = cluster.ranks, cluster.per_node
    fine = run.method.type != "full"
    tensors = [n for n in (1, 2, 4, 8) if n <= per_node and ranks % n == 0 and (n == 1 or _divides(n, heads, groups))]
    contexts = [
        n for n in (1, 2, 4, 8, 16) if n == 1 or (run.data.sequence_length >= LONG and not config.is_encoder_decoder)
    ]
    stages = [n for n in divisors_of(ranks) if n <= min(layers or 1, MOST_STAGES) and (n == 1 or n & (n - 1) == 0)]
    spread = [n for n in (1, 2, 4, 8, 16, 32, 64) if n == 1 or (experts and experts % n == 0)]
    if offload or ranks == 1:
        tensors, contexts, stages = [1], [1], [1]
    for tensor, context, pipeline, expert in product(tensors, contexts, stages, spread):
        inner = tensor * context * pipeline
        if inner > ranks or ranks % inner or (ranks // pipeline) % expert:
            continue
        data = ranks // inner
        if run.train.batch_size % data:
            continue
        per_rank = run.train.batch_size // data
        micros = [m for m in divisors_of(per_rank) if m <= MOST_MICRO and (m & (m - 1) == 0 or m == per_rank)]
        stages_of = _shardings(ranks // (tensor * pipeline), per_node // tensor, cluster.nodes, inner, offload)
        for zero, shard, secondary in stages_of:
            for micro, recompute in product(micros, (False, True)):
                if pipeline > 1 and per_rank // micro < pipeline:
                    continue
                for interleaved in (False, True) if pipeline > 1 and (layers or 0) >= 2 * pipeline else (False,):
                    axes = (tensor, context, pipeline, interleaved, expert)
                    if not offload:
                        yield Strategy(zero, shard, secondary, *axes, micro, recompute, alone=ranks == 1)
                    elif zero >= 2 and not fine and shard is None and secondary is None:
                        for place in ("cpu", "disk"):
                            yield Strategy(zero, None, None, *axes, micro, recompute, place, alone=ranks == 1)
                            if zero == 3:
                                both = (place, place)
                                yield Strategy(zero, None, None, *axes, micro, recompute, *both, alone=ranks == 1)


def _divides(size: int, heads: int | None, groups: int | None) -> bool:
    return bool(heads) and heads % size == 0 and (not groups or groups % size == 0 or size % groups == 0)  # type: ignore[operator]


def _shardings(
    spread: int, near: int, nodes: int, inner: int, offload: bool
) -> Iterator[tuple[int, int | None, int | None]]:
    """Stage, hybrid group and hpZ's second copy; `near` of the ranks are in one node."""
    if spread == 1:
        yield 2, None, None  # one rank has nothing to divide: the default
        if offload:
            yield 3, None, None  # what weights are kept elsewhere with
        return
    for zero in (0, 1, 2, 3):
        yield zero, None, None
        if zero >= 2 and nodes > 1 and 1 < near < spread and spread % near == 0:
            yield zero, near, None
            if zero == 3 and inner == 1:
                yield zero, None, near


def applied(run: Run, strategy: Strategy) -> Run:
    """The run with a strategy's settings."""
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
    made = Run.model_validate(values)
    compiles = compile_here(made, Machine(1))[0] if made.compile == "auto" else made.compile
    return made.model_copy(update={"compile": compiles})


def legal(run: Run, config: Any, ranks: int) -> str | None:
    """Why a run cannot be; None where it can."""
    try:
        check_axes(run, ranks)
        first_clash(run)
        check_parallel(run, ranks)
        check_model_axes(run, config, ranks)
    except UserError as error:
        return str(error)
    return None
