"""Ranks of which one is late, timed as on GPUs: by a timer around collectives, here by the host's clock."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from shardwise.observe.breakdown import Timer
from shardwise.observe.pace import Pace, SampledTimer


def slow_ranks(kind: str, late: int | None) -> list[int]:
    """Who is found slow in some steps of 20 ms, beside which the late one naps for four times as long."""
    device = torch.device("cpu")
    timer = SampledTimer(device) if kind == "sampled" else Timer(device)
    pace, found = Pace(dist.group.WORLD, timer), list[int]()
    pace._looks = None  # a timer of every step is asked for on CPUs too, and looks serve there
    for step in range(1, 81):
        pace.begin()
        with timer.region("forward"):
            time.sleep(0.02)
        if dist.get_rank() == late:
            time.sleep(0.08)
        with timer.region("step"), timer.meeting(dist.get_world_size()):
            dist.all_reduce(torch.ones(1))
        pace.end()
        if step % 16 == 0:
            timer.annotate([{}])
            found += [record["rank"] for record in pace.compare(step)]
    return found
