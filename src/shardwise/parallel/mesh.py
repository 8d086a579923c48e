"""The one place where process groups are made: the mesh of ranks, and a gloo group for the host's own talk.

The mesh has two axes, `replicate` × `shard`: ZeRO 0 is (N, 1), ZeRO 1–3 is (1, N), hybrid sharding is (N/s, s). Data is
split over both, so a rank's place in the data-parallel order is its place in the flattened mesh.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config.schema import Run


@dataclass(frozen=True)
class World:
    """Where this process stands: its rank, its device, the mesh, and host-side groups for votes and checkpoints."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def shard_size(zero: int, shard: int | None, ranks: int) -> int:
    """Ranks among which one copy of the states is divided."""
    return 1 if zero == 0 else (shard or ranks)


def init_world(run: Run) -> World:
    """Joins the process group that the environment (ours or torchrun's) describes and lays out the run's mesh."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    shard = shard_size(run.parallel.zero, run.parallel.shard, ranks)
    return join_world(run.device, run.backend, run.timeout, shard)


def join_world(device_type: str, backend: str, timeout: float, shard: int) -> World:
    """Joins (or, for one process, makes) the process group; the mesh has `shard` ranks along its shard axis."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # One process alone needs no meeting point, hence no port.
        store = HashStore() if size == 1 else None
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=timeout), store=store)
    mesh = init_device_mesh(device.type, (size // shard, shard), mesh_dim_names=("replicate", "shard"))
    # Own groups: sharing one with the training collectives crashes asynchronous checkpoints.
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    checkpoint = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(timeout, 1800)))
    return World(rank, size, local_rank, device, mesh, control, checkpoint)


@dataclass(frozen=True)
class Hops:
    """A shard group cut into nodes: the ranks `within` this one's node, and those `across` nodes with its place."""

    within: dist.ProcessGroup
    across: dist.ProcessGroup


def split_shards(mesh: DeviceMesh, size: int, timeout: float) -> Hops:
    """Cuts each shard group into nodes of `size` consecutive ranks; every rank of the run must call it."""
    nodes = mesh.mesh.view(mesh.size(0), -1, size)
    lists = {"within": nodes.flatten(0, 1).tolist(), "across": nodes.transpose(1, 2).flatten(0, 1).tolist()}
    mine: dict[str, dist.ProcessGroup] = {}
    for name, members in lists.items():
        for ranks in members:
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout))
            if dist.get_rank() in ranks:
                mine[name] = group
    return Hops(**mine)


def ranks_per_node(shard: int, control: dist.ProcessGroup) -> int:
    """The largest number of consecutive ranks of a shard group that are on one host, on every host."""
    sizes: list[int] = [1] * dist.get_world_size(control)
    dist.all_gather_object(sizes, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), group=control)
    return math.gcd(shard, *sizes)  # hosts may differ; their common divisor never straddles two
