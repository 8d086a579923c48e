"""What is to be shown of a run, one change at a time, on the smallest world that has all of its axes.

Each claim is a run of its own: the plain settings (one rank, one forward), what it is about, and what it rests on. One
that rests on a claim that failed shows nothing and is not tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from shardwise.config.combinations import axes_used
from shardwise.config.schema import Parallel, Run
from shardwise.foresight.verify.compare import EXACT, HALF, INT4, INT8, Bounds, wider

ROWS, BATCH = "rows", "batch"  # documents a row, and as the run lays them out
MODEL, PACKING, ACCUMULATION = "model and loss", "packing", "accumulation"


@dataclass(frozen=True)
class Claim:
    """One row of the certificate."""

    name: str
    what: str  # is compared
    settings: dict[str, Any]  # of the run, by dotted path, over the plain ones
    ranks: int = 1
    batch: str = BATCH
    bounds: Bounds = EXACT
    rests_on: tuple[str, ...] = ()
    lossy: str = ""  # why it has a bound of its own


@dataclass
class ClaimPlan:
    """All claims of a run, and the batch that they share."""

    claims: list[Claim]
    rows: int
    micro: int
    ranks: int
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ClaimWorld:
    """The least number of ranks along each axis that still shows what the run's own would."""

    axes: dict[str, int]  # tensor, context, pipeline, expert where longer than one
    data: int  # ranks with different data
    replicas: int  # of shard groups

    @property
    def ranks(self) -> int:
        inner = 1
        for name, size in self.axes.items():
            inner *= size if name != "expert" else 1
        return inner * self.data


def small_world(run: Run) -> ClaimWorld:
    """Two along each axis that is longer than one (three where it is 3 or 9: heads that it divides may be odd).

    `ranks: auto` may be any number, so data get two as well.
    """
    parallel = run.parallel
    axes = {name: 2 if name == "pipeline" else _least(getattr(parallel, name)) for name in axes_used(parallel)}
    inner = parallel.tensor * parallel.context * parallel.pipeline
    several = run.ranks == "auto" or int(run.ranks) > inner
    data, replicas = (2, 1) if several else (1, 1)
    if parallel.dp_shard_size is not None and parallel.zero and run.ranks != parallel.dp_shard_size:
        data, replicas = 4 // math.gcd(4, axes.get("context", 1)), 2
    if parallel.hpz_size is not None:
        data = 4 * replicas
    while (axes.get("tensor", 1) * axes.get("context", 1) * data) % axes.get("expert", 1):
        data += 1
    return ClaimWorld(axes, data, replicas)


def _least(size: int) -> int:
    """What divides whatever a size divides."""
    return next(d for d in range(2, size + 1) if size % d == 0)


def plan_claims(run: Run, packing: bool, precision: str) -> ClaimPlan:
    """The claims of a run whose objective is known."""
    world, train = small_world(run), run.train
    micro_wanted = train.micro_batch_size if train.micro_batch_size != "auto" else 2
    micro = 1 if world.data > 2 else min(2, int(micro_wanted))
    accumulates = _accumulates(run) or run.parallel.pipeline > 1
    rows = micro * world.data * (2 if accumulates else 1)
    # Two ranks have a share each, and so have the experts'; a row of its own would show nothing of rows.
    rows = math.lcm(rows, 2 * micro, micro * world.axes.get("expert", 1))
    plan = ClaimPlan([], rows, micro, world.ranks)
    half = HALF if precision != "fp32" else EXACT
    claims = plan.claims
    one = {"ranks": 1, "parallel.zero": 0, "train.micro_batch_size": rows}
    claims.append(Claim(
        MODEL, "as built and loaded, a document a row, one forward", one | {
            "data.packing": False}, batch=ROWS if packing else BATCH, bounds=half,
    ))  # fmt: skip
    base = MODEL
    if packing:
        claims.append(Claim(PACKING, "the documents packed into rows, one forward", one, bounds=half, rests_on=(base,)))
        base = PACKING
    if accumulates:
        claims.append(Claim(
            ACCUMULATION, f"{rows // micro} micro-batches, each token counted once",
            one | {"train.micro_batch_size": micro}, bounds=half, rests_on=(base,),
        ))  # fmt: skip
        base = ACCUMULATION
    cut = micro if accumulates or world.data > 1 or "context" in world.axes else rows
    _add_local(run, claims, one | {"train.micro_batch_size": cut}, half, base)
    _add_sharding(run, claims, world, cut, half, base)
    _add_axes(run, claims, world, micro, half, base)
    _add_all(run, claims, world, cut, half)
    plan.ranks = max(claim.ranks for claim in claims)
    _tell_world(run, world, plan)
    return plan


def _accumulates(run: Run) -> bool:
    train, inner = run.train, run.parallel.tensor * run.parallel.context * run.parallel.pipeline
    if train.micro_batch_size == "auto" or run.ranks == "auto":
        return True
    return train.batch_size > int(train.micro_batch_size) * max(1, int(run.ranks) // inner)


def _add_local(run: Run, claims: list[Claim], one: dict[str, Any], half: Bounds, base: str) -> None:
    """What a rank does by itself."""
    if run.recompute != "none":
        light = run.recompute == "light"
        settings = one | _recomputed(run) | ({"compile": True} if light else {})
        told = "what is cheap of blocks computed again in backward" if light else "blocks computed again in backward"
        told += "" if run.recompute_attention else ", attention kept"
        claims.append(Claim("recompute", told, settings, bounds=half, rests_on=(base,)))
    if run.compiled:
        claims.append(Claim("compile", "blocks compiled", one | {"compile": True}, bounds=half, rests_on=(base,)))
    if run.train.optimizer_in_backward:
        settings = one | {"train.optimizer_in_backward": True}
        claims.append(Claim("updates in backward", "each parameter when its gradient is known", settings,
                            bounds=half, rests_on=(base,)))  # fmt: skip


def _stage(run: Run) -> str:
    return f"ZeRO-{run.parallel.zero}" if run.parallel.zero else "data parallel"


def _add_sharding(run: Run, claims: list[Claim], world: ClaimWorld, cut: int, half: Bounds, base: str) -> None:
    """ZeRO on two ranks, then what the run adds to it, each by itself."""
    parallel, name = run.parallel, f"{_stage(run)} on 2 ranks"
    plain: dict[str, Any] = {"ranks": 2, "parallel.zero": parallel.zero, "train.micro_batch_size": cut}
    sharded = world.data > 1 or parallel.context > 1
    if sharded:
        what = {
            0: "gradients summed over ranks", 1: "optimizer states divided", 2: "states and gradients divided",
            3: "parameters, gradients and states divided",
        }[parallel.zero]  # fmt: skip
        claims.append(Claim(name, what, plain, 2, bounds=half, rests_on=(base,)))
        base = name
        four = plain | {"ranks": 4, "train.micro_batch_size": 1}
        if world.replicas > 1:
            claims.append(Claim(
                f"{_stage(run)} hybrid on 2 × 2 ranks", "divided over 2 ranks, 2 copies",
                four | {"parallel.dp_shard_size": 2}, 4, bounds=half, rests_on=(base,),
            ))  # fmt: skip
        if parallel.hpz_size is not None:
            claims.append(Claim(
                "ZeRO++ hpZ on 4 ranks", "a second copy of the parameters over 2 ranks",
                four | {"parallel.hpz_size": 2}, 4, bounds=half, rests_on=(base,),
            ))  # fmt: skip
        if parallel.quantize_weights:
            claims.append(Claim(
                "ZeRO++ qwZ on 2 ranks", "weights gathered as int8", plain | {"parallel.quantize_weights": True}, 2,
                bounds=wider(half, INT8), rests_on=(base,), lossy="int8 weights",
            ))  # fmt: skip
        if parallel.quantize_gradients:
            claims.append(Claim(
                "ZeRO++ qgZ on 2 ranks", "gradients reduced in 4 bits",
                plain | {"parallel.quantize_gradients": True}, 2,
                bounds=wider(half, INT4), rests_on=(base,), lossy="4-bit gradients",
            ))  # fmt: skip
        if isinstance(parallel.bucket, int):
            settings = plain | {"parallel.bucket": parallel.bucket}
            claims.append(Claim("buckets on 2 ranks", "blocks divided or joined to suit", settings, 2, bounds=half,
                                rests_on=(base,)))  # fmt: skip
        if isinstance(parallel.prefetch, int):
            settings = plain | {"parallel.prefetch": parallel.prefetch}
            claims.append(Claim("prefetch on 2 ranks", f"{parallel.prefetch} units gathered ahead", settings, 2,
                                bounds=half, rests_on=(base,)))  # fmt: skip
        if parallel.reduce_dtype == "bf16":
            claims.append(Claim(
                "bf16 sums on 2 ranks", "gradients reduced in bf16", plain | {"parallel.reduce_dtype": "bf16"}, 2,
                bounds=wider(half, INT8), rests_on=(base,), lossy="bf16 sums",
            ))  # fmt: skip
    places = {name: getattr(run.offload, name) for name in ("optimizer", "parameters", "activations")}
    if used := {name: place for name, place in places.items() if place != "none"}:
        ranks = 2 if sharded else 1
        settings = plain | {"ranks": ranks, "offload.ratio": run.offload.ratio}
        # Inputs of blocks are there to be offloaded where blocks are computed again; by itself it is another claim.
        settings |= _recomputed(run) if "activations" in used else {}
        settings |= {f"offload.{name}": place for name, place in used.items()}
        told = ", ".join(f"{name} on {'the host' if place == 'cpu' else place}" for name, place in used.items())
        claims.append(Claim("offload", told, settings, ranks, bounds=half, rests_on=(base,)))


def _recomputed(run: Run) -> dict[str, Any]:
    return {
        "recompute": run.recompute, "recompute_blocks": run.recompute_blocks, "recompute_group": run.recompute_group,
        "recompute_attention": run.recompute_attention,
    }  # fmt: skip


def _axis_settings(parallel: Parallel, axes: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {f"parallel.{name}": size for name, size in axes.items()}
    if "pipeline" in axes:
        found |= {
            "parallel.pipeline_schedule": parallel.pipeline_schedule,
            "parallel.virtual_stages": parallel.virtual_stages and 2,
        }
    if "context" in axes:
        found |= {"parallel.context_kind": parallel.context_kind}
    return found


def _add_axes(run: Run, claims: list[Claim], world: ClaimWorld, micro: int, half: Bounds, base: str) -> None:
    """Each axis alone."""
    what = {
        "tensor": "each weight divided over {} ranks", "context": "each sequence divided over {} ranks",
        "pipeline": "the blocks divided over {} stages", "expert": "the experts divided over {} ranks",
    }  # fmt: skip
    for name, size in world.axes.items():
        settings = {"ranks": size, "parallel.zero": 0, "train.micro_batch_size": micro}
        settings |= _axis_settings(run.parallel, {name: size})
        kind = f" ({run.parallel.context_kind})" if name == "context" else ""
        kind = f" ({run.parallel.pipeline_schedule})" if name == "pipeline" else kind
        told = what[name].format(size)
        claims.append(Claim(f"{name} {size}{kind}", told, settings, size, bounds=half, rests_on=(base,)))


def _add_all(run: Run, claims: list[Claim], world: ClaimWorld, cut: int, half: Bounds) -> None:
    """The run as it is, small, where that is more than one of the claims above."""
    parallel, offload = run.parallel, run.offload
    settings: dict[str, Any] = {
        "ranks": world.ranks, "parallel.zero": parallel.zero, "compile": run.compiled,
        "train.optimizer_in_backward": run.train.optimizer_in_backward, "offload.optimizer": offload.optimizer,
        "offload.parameters": offload.parameters, "offload.activations": offload.activations,
        "offload.ratio": offload.ratio, "parallel.bucket": parallel.bucket,
        "parallel.prefetch": parallel.prefetch, "parallel.reduce_dtype": parallel.reduce_dtype,
        "parallel.quantize_weights": parallel.quantize_weights,
        "parallel.quantize_gradients": parallel.quantize_gradients,
        "parallel.error_feedback": parallel.error_feedback,
    }  # fmt: skip
    settings |= _recomputed(run) | _axis_settings(parallel, world.axes)
    if world.ranks > 1:
        settings["recompute_group"] = 1  # is for one rank: a claim of its own
    words = [f"{name} {size}" for name, size in world.axes.items()]
    if world.replicas > 1:
        settings["parallel.dp_shard_size"] = 2
    if parallel.hpz_size is not None:
        settings["parallel.hpz_size"] = 2
    if world.data > 1 or parallel.context > 1:
        words.append(f"{_stage(run)}{' hybrid' if world.replicas > 1 else ''}")
    rows_each = claims[0].settings["train.micro_batch_size"] // world.data
    settings["train.micro_batch_size"] = min(cut, rows_each)
    parts = [claim for claim in claims if claim.name not in (MODEL, PACKING, ACCUMULATION)]
    if len(parts) < 2:
        return
    bounds = half
    for part in parts:
        bounds = wider(bounds, part.bounds)
    lossy = ", ".join(part.lossy for part in parts if part.lossy)
    more = [part.name for part in parts if part.ranks == 1 or part.name == "offload"]
    ranks = f" on {world.ranks} ranks" if world.ranks > 1 else ""
    name = " + ".join([" × ".join(words), *more] if words else more) + ranks
    if any(claim.name == name for claim in claims):  # ZeRO alone, with settings that have no name in it
        name = f"all settings of {name}"
    claims.append(Claim(
        name, "all of it together", settings, world.ranks, bounds=bounds,
        rests_on=tuple(part.name for part in parts), lossy=lossy,
    ))  # fmt: skip


def _tell_world(run: Run, world: ClaimWorld, plan: ClaimPlan) -> None:
    asked = {name: getattr(run.parallel, name) for name in world.axes}
    lowered = [f"{name} {size} → {world.axes[name]}" for name, size in asked.items() if size > world.axes[name]]
    if run.ranks != "auto" and int(run.ranks) > plan.ranks:
        lowered.append(f"{run.ranks} ranks → {plan.ranks}")
    if lowered:
        plan.notes.append(f"smallest world with every axis of the run: {', '.join(lowered)}")
    if run.ranks == "auto":
        plan.notes.append(f"ranks: auto, shown on {plan.ranks}")
