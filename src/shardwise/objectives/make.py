"""Builds the objective that the loop calls from the settings of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.nn.objective import Objective
from shardwise.objectives.causal import CausalObjective
from shardwise.objectives.classify import ClassifyObjective
from shardwise.objectives.head import join_head
from shardwise.objectives.masked import MaskedObjective
from shardwise.objectives.seq2seq import Seq2seqObjective
from shardwise.parallel.parallel_context import ParallelContext

if TYPE_CHECKING:
    from shardwise.distributed.mesh import World
    from shardwise.parallel.routers.hooks import RouterLosses
    from shardwise.parallel.selfcheck import CallsWhole
    from shardwise.parallel.zero.stages import ShardedModel
    from shardwise.resolved_run import ResolvedRun


def make_objective(
    job: ResolvedRun,
    world: World,
    sharded: ShardedModel,
    apart: bool,
    trial: CallsWhole | None = None,
    say: Callable[[str], None] = lambda _: None,
    routers: RouterLosses | None = None,
    context: ParallelContext | None = None,
) -> Objective:
    """The run's objective over its sharded model.

    `apart`: as returned by `check_documents`. `trial`: a model that runs full forwards where the
    sharded one cannot. `routers`: adds their losses. `context`: the model's axes, if it has any.
    """
    from shardwise.parallel.routers.hooks import RoutedObjective

    plain = _plain(job, world, sharded, apart, trial, say, context or ParallelContext(world))
    if routers is None:
        return plain
    return RoutedObjective(plain, routers)


def _plain(
    job: ResolvedRun,
    world: World,
    sharded: ShardedModel,
    apart: bool,
    trial: CallsWhole | None,
    say: Callable[[str], None],
    context: ParallelContext,
) -> Objective:
    settings: Any = job.run.objective
    match settings.type:
        case "causal":
            head = join_head(sharded, trial or sharded) if job.run.loss == "auto" else None
            return CausalObjective(sharded.model, apart, head)
        case "seq2seq":
            return Seq2seqObjective()
        case "masked":
            return MaskedObjective()
        case "classify":
            return ClassifyObjective(sharded.model)
        case "dpo" | "orpo" | "kto":
            return _judged(job, world, sharded.model, apart, context)
        case "distill":
            from shardwise.objectives.distill import make_distill

            return make_distill(job, world, sharded, apart, say)
        case other:
            raise NotImplementedError(other)


def _judged(
    job: ResolvedRun, world: World, model: Any, apart: bool, context: ParallelContext
) -> Objective:
    from shardwise.objectives.kto import KtoObjective
    from shardwise.objectives.preference import DpoObjective, OrpoObjective
    from shardwise.objectives.reference import make_reference

    settings: Any = job.run.objective
    group = context.parts
    if settings.type == "orpo":
        return OrpoObjective(model, apart, settings, group)
    kind = DpoObjective if settings.type == "dpo" else KtoObjective
    return kind(model, apart, settings, make_reference(job, world, model, context), group)
