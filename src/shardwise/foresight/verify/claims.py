"""The claims to verify for a run, one change at a time, on the smallest world that has all of its axes.

Each claim is a run of its own: the plain settings (one rank, one forward), the claim's own setting, and those it
depends on. A claim that depends on one that failed shows nothing and is not tried.
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
    """All claims of a run, and the batch they share."""

    claims: list[Claim]
    rows: int
    micro: int
    ranks: int
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ClaimWorld:
    """The smallest number of ranks along each axis that still shows what the run's own would."""

    axes: dict[str, int]  # tensor, context, pipeline, expert where longer than one
    data: int  # ranks with different data
    replicas: int  # of shard groups

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        inner = 1
        for name, size in self.axes.items():
            inner *= size if name != "expert" else 1
        return inner * self.data


def small_world(run: Run) -> ClaimWorld:
    """Returns two ranks along each axis longer than one (three for 3 or 9: the number of heads may be odd).

    `ranks: auto` may be any number, so the data axis gets two as well.
    """
    parallel = run.parallel
    axes = {
        name: 2 if name == "pipeline" else _smallest_divisor(getattr(parallel, name)) for name in axes_used(parallel)
    }
    inner = parallel.tensor * parallel.context * parallel.pipeline
    shards_data = run.ranks == "auto" or int(run.ranks) > inner
    data, replicas = (2, 1) if shards_data else (1, 1)
    if parallel.dp_shard_size is not None and parallel.zero and run.ranks != parallel.dp_shard_size:
        data = 4 // math.gcd(4, axes.get("context", 1))
        replicas = 2
    if parallel.hpz_size is not None:
        data = 4 * replicas
    while (axes.get("tensor", 1) * axes.get("context", 1) * data) % axes.get("expert", 1):
        data += 1
    return ClaimWorld(axes, data, replicas)


def _smallest_divisor(size: int) -> int:
    """The smallest divisor: it divides whatever `size` divides."""
    return next(d for d in range(2, size + 1) if size % d == 0)


def plan_claims(run: Run, packing: bool, precision: str) -> ClaimPlan:
    """Returns the claims of a run whose objective is resolved."""
    world = small_world(run)
    train = run.train
    micro_wanted = train.micro_batch_size if train.micro_batch_size != "auto" else 2
    micro = 1 if world.data > 2 else min(2, int(micro_wanted))
    accumulates = _accumulates(run) or run.parallel.pipeline > 1
    rows = micro * world.data * (2 if accumulates else 1)
    # Two ranks have a share each, and so have the experts'; a row of its own would show nothing of rows.
    rows = math.lcm(rows, 2 * micro, micro * world.axes.get("expert", 1))
    plan = ClaimPlan([], rows, micro, world.ranks)
    half = HALF if precision != "fp32" else EXACT
    claims = plan.claims
    plain = {"ranks": 1, "parallel.zero": 0, "train.micro_batch_size": rows}
    claims.append(Claim(
        MODEL, "as built and loaded, a document a row, one forward", plain | {
            "data.packing": False}, batch=ROWS if packing else BATCH, bounds=half,
    ))  # fmt: skip
    base = MODEL
    if packing:
        claims.append(
            Claim(PACKING, "the documents packed into rows, one forward", plain, bounds=half, rests_on=(base,))
        )
        base = PACKING
    if accumulates:
        claims.append(Claim(
            ACCUMULATION, f"{rows // micro} micro-batches, each token counted once",
            plain | {"train.micro_batch_size": micro}, bounds=half, rests_on=(base,),
        ))  # fmt: skip
        base = ACCUMULATION
    micro_or_rows = micro if accumulates or world.data > 1 or "context" in world.axes else rows
    _add_local(run, claims, plain | {"train.micro_batch_size": micro_or_rows}, half, base)
    _add_sharding(run, claims, world, micro_or_rows, half, base)
    _add_axes(run, claims, world, micro, half, base)
    _add_all(run, claims, world, micro_or_rows, half)
    plan.ranks = max(claim.ranks for claim in claims)
    _note_world(run, world, plan)
    return plan


def _accumulates(run: Run) -> bool:
    train = run.train
    inner = run.parallel.tensor * run.parallel.context * run.parallel.pipeline
    if train.micro_batch_size == "auto" or run.ranks == "auto":
        return True
    return train.batch_size > int(train.micro_batch_size) * max(1, int(run.ranks) // inner)


def _add_local(run: Run, claims: list[Claim], plain: dict[str, Any], half: Bounds, base: str) -> None:
    """Claims about a single rank: recomputation, compilation, updates in backward."""
    if run.recompute != "none":
        light = run.recompute == "light"
        settings = plain | _recompute_settings(run) | ({"compile": True} if light else {})
        compared = (
            "what is cheap of blocks computed again in backward" if light else "blocks computed again in backward"
        )
        compared += "" if run.recompute_attention else ", attention kept"
        claims.append(Claim("recompute", compared, settings, bounds=half, rests_on=(base,)))
    if run.compiled:
        claims.append(Claim("compile", "blocks compiled", plain | {"compile": True}, bounds=half, rests_on=(base,)))
    if run.train.optimizer_in_backward:
        settings = plain | {"train.optimizer_in_backward": True}
        claims.append(Claim("updates in backward", "each parameter when its gradient is known", settings,
                            bounds=half, rests_on=(base,)))  # fmt: skip


def _stage(run: Run) -> str:
    return f"ZeRO-{run.parallel.zero}" if run.parallel.zero else "data parallel"


def _add_sharding(run: Run, claims: list[Claim], world: ClaimWorld, micro: int, half: Bounds, base: str) -> None:
    """ZeRO on two ranks, then each setting the run adds to it, by itself."""
    parallel = run.parallel
    name = f"{_stage(run)} on 2 ranks"
    plain: dict[str, Any] = {"ranks": 2, "parallel.zero": parallel.zero, "train.micro_batch_size": micro}
    sharded = world.data > 1 or parallel.context > 1
    if sharded:
        compared = {
            0: "gradients summed over ranks", 1: "optimizer states divided", 2: "states and gradients divided",
            3: "parameters, gradients and states divided",
        }[parallel.zero]  # fmt: skip
        claims.append(Claim(name, compared, plain, 2, bounds=half, rests_on=(base,)))
        base = name
        on_four = plain | {"ranks": 4, "train.micro_batch_size": 1}
        if world.replicas > 1:
            claims.append(Claim(
                f"{_stage(run)} hybrid on 2 × 2 ranks", "divided over 2 ranks, 2 copies",
                on_four | {"parallel.dp_shard_size": 2}, 4, bounds=half, rests_on=(base,),
            ))  # fmt: skip
        if parallel.hpz_size is not None:
            claims.append(Claim(
                "ZeRO++ hpZ on 4 ranks", "a second copy of the parameters over 2 ranks",
                on_four | {"parallel.hpz_size": 2}, 4, bounds=half, rests_on=(base,),
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
    if offloaded := {name: place for name, place in places.items() if place != "none"}:
        ranks = 2 if sharded else 1
        settings = plain | {"ranks": ranks, "offload.ratio": run.offload.ratio}
        # Inputs of blocks are there to be offloaded where blocks are computed again; by itself it is another claim.
        settings |= _recompute_settings(run) if "activations" in offloaded else {}
        settings |= {f"offload.{name}": place for name, place in offloaded.items()}
        compared_offload = ", ".join(
            f"{name} on {'the host' if place == 'cpu' else place}" for name, place in offloaded.items()
        )
        claims.append(Claim("offload", compared_offload, settings, ranks, bounds=half, rests_on=(base,)))


def _recompute_settings(run: Run) -> dict[str, Any]:
    return {
        "recompute": run.recompute, "recompute_blocks": run.recompute_blocks, "recompute_group": run.recompute_group,
        "recompute_attention": run.recompute_attention,
    }  # fmt: skip


def _axis_settings(parallel: Parallel, axes: dict[str, int]) -> dict[str, Any]:
    settings: dict[str, Any] = {f"parallel.{name}": size for name, size in axes.items()}
    if "pipeline" in axes:
        settings |= {
            "parallel.pipeline_schedule": parallel.pipeline_schedule,
            "parallel.virtual_stages": parallel.virtual_stages and 2,
        }
    if "context" in axes:
        settings |= {"parallel.context_kind": parallel.context_kind}
    return settings


def _add_axes(run: Run, claims: list[Claim], world: ClaimWorld, micro: int, half: Bounds, base: str) -> None:
    """Each axis alone."""
    templates = {
        "tensor": "each weight divided over {} ranks", "context": "each sequence divided over {} ranks",
        "pipeline": "the blocks divided over {} stages", "expert": "the experts divided over {} ranks",
    }  # fmt: skip
    for name, size in world.axes.items():
        settings = {"ranks": size, "parallel.zero": 0, "train.micro_batch_size": micro}
        settings |= _axis_settings(run.parallel, {name: size})
        kind = f" ({run.parallel.context_kind})" if name == "context" else ""
        kind = f" ({run.parallel.pipeline_schedule})" if name == "pipeline" else kind
        compared = templates[name].format(size)
        claims.append(Claim(f"{name} {size}{kind}", compared, settings, size, bounds=half, rests_on=(base,)))


def _add_all(run: Run, claims: list[Claim], world: ClaimWorld, micro: int, half: Bounds) -> None:
    """The whole run, small, unless it equals one of the claims above."""
    parallel = run.parallel
    offload = run.offload
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
    settings |= _recompute_settings(run) | _axis_settings(parallel, world.axes)
    if world.ranks > 1:
        settings["recompute_group"] = 1  # is for one rank: a claim of its own
    names = [f"{name} {size}" for name, size in world.axes.items()]
    if world.replicas > 1:
        settings["parallel.dp_shard_size"] = 2
    if parallel.hpz_size is not None:
        settings["parallel.hpz_size"] = 2
    if world.data > 1 or parallel.context > 1:
        names.append(f"{_stage(run)}{' hybrid' if world.replicas > 1 else ''}")
    rows_each = claims[0].settings["train.micro_batch_size"] // world.data
    settings["train.micro_batch_size"] = min(micro, rows_each)
    parts = [claim for claim in claims if claim.name not in (MODEL, PACKING, ACCUMULATION)]
    if len(parts) < 2:
        return
    bounds = half
    for part in parts:
        bounds = wider(bounds, part.bounds)
    lossy = ", ".join(part.lossy for part in parts if part.lossy)
    local = [part.name for part in parts if part.ranks == 1 or part.name == "offload"]
    ranks = f" on {world.ranks} ranks" if world.ranks > 1 else ""
    name = " + ".join([" × ".join(names), *local] if names else local) + ranks
    if any(claim.name == name for claim in claims):  # ZeRO alone, with settings that have no name in it
        name = f"all settings of {name}"
    claims.append(Claim(
        name, "all of it together", settings, world.ranks, bounds=bounds,
        rests_on=tuple(part.name for part in parts), lossy=lossy,
    ))  # fmt: skip


def _note_world(run: Run, world: ClaimWorld, plan: ClaimPlan) -> None:
    sizes = {name: getattr(run.parallel, name) for name in world.axes}
    lowered = [f"{name} {size} → {world.axes[name]}" for name, size in sizes.items() if size > world.axes[name]]
    if run.ranks != "auto" and int(run.ranks) > plan.ranks:
        lowered.append(f"{run.ranks} ranks → {plan.ranks}")
    if lowered:
        plan.notes.append(f"smallest world with every axis of the run: {', '.join(lowered)}")
    if run.ranks == "auto":
        plan.notes.append(f"ranks: auto, shown on {plan.ranks}")
