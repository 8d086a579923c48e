"""A rank of a world that is not there: process groups of any size in one process, whose collectives return at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.config.schema import Run
from shardwise.distributed.mesh import World, join_world, layout_of


@contextmanager
def fake_world(run: Run, rank: int, ranks: int, device: str = "cpu") -> Iterator[World]:
    """This process as one rank of many, until the end of the block; every collective leaves its buffers as they are.

    On a GPU only where kernels are to run: rehearsals take place on a CPU's fake tensors.
    """
    from shardwise.core.compat.torch_private import FakeStore

    assert not dist.is_initialized(), "a rehearsal needs a process without groups of its own"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(zip(names, map(str, (rank, ranks, 0, 1)), strict=True))
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        yield join_world(device, "fake", run.timeout, layout_of(run.parallel, ranks))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
