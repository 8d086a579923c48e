"""Gradients divided over ranks, and their norm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.observe.breakdown import Timer
from shardwise.parallel.zero.stages import ShardedModel


def measured(kind: str) -> tuple[float, float, int]:
    """The norm by `ShardedModel.norm`, as on that kind of device; that of the whole; how often ranks met for it."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    whole = [torch.randn(*shape) for shape in [(7, 5), (2, 3), (64,)]]
    parts = [distribute_tensor(one, mesh["shard"], [Shard(0)]) for one in whole]
    timer, met = Timer(torch.device("cpu")), list[int]()
    plain = timer.meeting
    timer.meeting = lambda ranks: met.append(ranks) or plain(ranks)  # type: ignore[method-assign,func-returns-value]
    sharded: Any = SimpleNamespace(mesh=mesh, device=torch.device("cpu"), timer=timer)
    sharded.sum_up = lambda figures, group: ShardedModel.sum_up(sharded, figures, group)
    with patch("shardwise.parallel.zero.stages.effective_device", lambda _: kind):
        norm = ShardedModel.norm(sharded, parts)
    expected = torch.cat([one.flatten() for one in whole]).double().norm()
    return float(norm), float(expected), len(met)
