"""A tiny model that is assembled as a run's, on ranks that have joined."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardwise.distributed.mesh import join_world, layout_of
from shardwise.foresight.zoo.run import run_along
from shardwise.nn.tiny.case import Deviation, TinyCase, judge
from shardwise.parallel.tiny_reference import alone
from shardwise.train.trial.check import small_run
from shardwise.train.trial.step import try_run


def along(axis: str, case: TinyCase, **parallel: Any) -> Deviation:
    """How far a case on two ranks along an axis is from one process."""
    run, ranks = small_run(run_along(axis, **parallel))
    assert ranks == dist.get_world_size()
    return judge(try_run(case, run, join_world("cpu", "gloo", 120.0, layout_of(run.parallel, ranks))), alone(case))
