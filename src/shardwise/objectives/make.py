"""From the settings to the object that the loop calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.objectives.base import Objective
from shardwise.objectives.causal import CausalObjective

if TYPE_CHECKING:
    from shardwise.parallel.mesh import World
    from shardwise.train.job import Job
    from shardwise.zero.stages import ShardedModel


def make_objective(job: Job, world: World, sharded: ShardedModel, apart: bool) -> Objective:
    """The run's objective over its sharded model; `apart` as the model's check found."""
    settings: Any = job.run.objective
    match settings.type:
        case "causal":
            return CausalObjective(sharded.model, apart)
        case other:
            raise NotImplementedError(other)
