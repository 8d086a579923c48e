"""The single place where process groups are created: the mesh of ranks, and gloo groups for host-side communication.

[Note: axes] From the outermost to the innermost, so that ranks that communicate most are neighbours, on one node:

  pipeline   consecutive blocks of the model            activations from stage to stage
  replicate  copies of the shard groups                 gradients, once a step
  shard      ZeRO: sharded states (gradients, weights)  gathers and reductions, per block
  context    parts of each sequence                     keys and values, in each attention
  tensor     parts of each weight                       activations, twice per block and direction

Data parallelism is over the rest: ranks / (pipeline x context x tensor). Ranks along `context` hold the same weights
and so take part in ZeRO: FSDP's axes (replicate, shard) span data x context. `expert` is not a separate axis: it groups
consecutive ranks of a pipeline stage once more, for the experts' weights alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.config.axes import shard_size
from shardwise.config.schema import Parallel, Run
from shardwise.core.compat.torch_private import HashStore
from shardwise.distributed.shared_gpu import teach_gathers

LATER = 20.0  # seconds beyond the run's timeout at which a collective gives up: the watchdog is to speak first


@dataclass(frozen=True)
class MeshLayout:
    """Number of ranks along each axis; `replicate` and `shard` are FSDP's, over data and context together."""

    replicate: int
    shard: int
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """Number of ranks that see different data."""
        return self.replicate * self.shard // self.context

    @property
    def dense_mesh(self) -> tuple[int, int, int, int]:
        """Stages, replicas, ranks that shard each replica by ZeRO, ranks with different parts of a weight."""
        return self.pipeline, self.replicate, self.shard, self.tensor

    @property
    def expert_mesh(self) -> tuple[int, int, int, int]:
        """Stages, replicas of the experts, ranks that shard each replica by ZeRO, ranks with different experts."""
        each = self.ranks // self.pipeline // self.expert
        shard = math.gcd(each, max(1, self.shard * self.tensor // self.expert)) if self.shard > 1 else 1
        return self.pipeline, each // shard, shard, self.expert

    def place(self, rank: int) -> MeshPlace:
        """Coordinates of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        stage, spread = divmod(rest, self.replicate * self.shard)
        data, context = divmod(spread, self.context)
        return MeshPlace(stage, data, context, tensor)


@dataclass(frozen=True)
class MeshPlace:
    """A rank's coordinates: its pipeline stage, its share of the data, of each sequence, and of each weight."""

    pipeline: int
    data: int
    context: int
    tensor: int


def layout_of(parallel: Parallel, ranks: int) -> MeshLayout:
    """The layout of the settings, which were checked to divide the ranks."""
    spread = ranks // (parallel.pipeline * parallel.tensor)
    shard = shard_size(parallel.zero, parallel.dp_shard_size, spread)
    axes = (parallel.pipeline, parallel.context, parallel.tensor, parallel.expert)
    return MeshLayout(spread // shard, shard, *axes)


@dataclass(frozen=True)
class World:
    """This process in the run: its rank, its device, the meshes, and host-side groups for votes and checkpoints.

    `mesh` is FSDP's: (replicate, shard). The others exist if their axis is longer than one.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup
    checkpoint: dist.ProcessGroup
    layout: MeshLayout
    copies: dist.ProcessGroup | None = None  # for copies in memory, where there are any
    tensor: DeviceMesh | None = None
    context: DeviceMesh | None = None
    pipeline: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    expert_shards: DeviceMesh | None = None  # FSDP's (replicate, shard) for the experts' weights

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def place(self) -> MeshPlace:
        return self.layout.place(self.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank represents those with the same micro-batches."""
        place = self.place
        return place.tensor == place.context == place.pipeline == 0


def init_world(run: Run) -> World:
    """Joins the process group described by the environment (ours or torchrun's) and creates the run's meshes."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    copies = run.checkpoint.memory is not None
    return join_world(run.device, run.backend, run.timeout, layout_of(run.parallel, ranks), copies)


def join_world(device_type: str, backend: str, timeout: float, layout: MeshLayout, copies: bool = False) -> World:
    """Joins (or, for one process, creates) the process group, and creates the meshes."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # One process alone needs no meeting point, hence no port.
        store = HashStore() if size == 1 else None
        limit = timedelta(seconds=timeout + LATER)
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=limit, store=store)
    if device.type == "cuda" and dist.get_backend() == "gloo":
        teach_gathers()
    meshes = _meshes(device.type, layout)
    used_in_steps = [mesh for name, mesh in meshes.items() if name != "pipeline"]  # stages have their own links
    connect([group for mesh in used_in_steps for group in mesh.get_all_groups()], device)
    # Own groups: sharing one with the training collectives crashes asynchronous checkpoints.
    host = "fake" if dist.get_backend() == "fake" else "gloo"  # ranks of a rehearsal talk to nobody
    control = dist.new_group(backend=host, timeout=timedelta(seconds=timeout + LATER))
    checkpoint = dist.new_group(backend=host, timeout=timedelta(seconds=max(timeout, 1800)))
    # Of their own again: a copy is made while a checkpoint may still be written.
    third = dist.new_group(backend=host, timeout=timedelta(seconds=max(timeout, 1800))) if copies else None
    return World(
        rank, size, local_rank, device, control=control, checkpoint=checkpoint, layout=layout, copies=third, **meshes
    )  # fmt: skip


def _meshes(device: str, layout: MeshLayout) -> dict[str, DeviceMesh]:
    """All meshes by their names in World; FSDP and `tensor` share a root, as parameters sharded by both require.

    Context and experts have roots of their own: no parameter is sharded along them and another axis of this root.
    """
    pipeline = layout.pipeline
    tensor = layout.tensor
    fsdp = (layout.replicate, layout.shard)
    names = ("replicate", "shard")
    if pipeline == tensor == 1:
        meshes = {"mesh": init_device_mesh(device, fsdp, mesh_dim_names=names)}
    else:
        root = init_device_mesh(device, (pipeline, *fsdp, tensor), mesh_dim_names=("pipeline", *names, "tensor"))
        meshes = {"mesh": root[names]}
        meshes |= {"tensor": root["tensor"]} if tensor > 1 else {}
        meshes |= {"pipeline": root["pipeline"]} if pipeline > 1 else {}
    if layout.context > 1:
        shape = (pipeline * layout.data, layout.context, tensor)
        meshes["context"] = init_device_mesh(device, shape, mesh_dim_names=("other", "context", "tensor"))["context"]
    if layout.expert > 1:
        root = init_device_mesh(device, layout.expert_mesh, mesh_dim_names=("pipeline", *names, "expert"))
        meshes |= {"expert": root["expert"], "expert_shards": root[names]}
    return meshes


def all_shard(world: World) -> World:
    """The same ranks without axes: one group that shards a model that runs before training; collective."""
    if world.layout.pipeline == world.layout.context == world.layout.tensor == world.layout.expert == 1:
        return world
    layout = MeshLayout(1, world.size)
    meshes: dict[str, Any] = dict(_meshes(world.device.type, layout))
    connect(meshes["mesh"].get_all_groups(), world.device)
    none: dict[str, Any] = dict.fromkeys(("tensor", "context", "pipeline", "expert", "expert_shards"))
    return replace(world, layout=layout, **meshes, **none)


def connect(groups: Iterable[dist.ProcessGroup], device: torch.device, neighbours: bool = False) -> None:
    """Makes NCCL connect the ranks of groups now, where it would do so in a collective in the middle of a step.

    `neighbours`: for messages between consecutive ranks, too. Every rank calls it with its groups in the same order.
    """
    for group in groups:
        if dist.get_backend(group) != "nccl" or dist.get_world_size(group) == 1:
            continue
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        operations = []
        for peer in {(rank + 1) % size, (rank - 1) % size} - {rank} if neighbours else ():
            for kind in (dist.isend, dist.irecv):
                operations.append(dist.P2POp(kind, torch.zeros(1, device=device), group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Hops:
    """A shard group split into nodes: the ranks `within` this rank's node, and those `across` nodes at its position."""

    within: dist.ProcessGroup
    across: dist.ProcessGroup


def split_shards(mesh: tuple[int, int, int, int], size: int, device: torch.device, timeout: float) -> Hops:
    """Splits each shard group into nodes of `size` consecutive members; collective over all ranks of the run.

    `mesh` is one of the layout's: its third axis shards.
    """
    shards = torch.arange(math.prod(mesh)).view(mesh).transpose(2, 3)
    nodes = shards.reshape(-1, mesh[2] // size, size)
    lists = {"within": nodes.flatten(0, 1).tolist(), "across": nodes.transpose(1, 2).flatten(0, 1).tolist()}
    own_groups: dict[str, dist.ProcessGroup] = {}
    for name, members in lists.items():
        for ranks in members:
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout + LATER))
            if dist.get_rank() in ranks:
                own_groups[name] = group
    connect(own_groups.values(), device)
    return Hops(**own_groups)


def ranks_per_node(control: dist.ProcessGroup) -> int:
    """The largest number of consecutive ranks that share a host, on every host."""
    sizes: list[int] = [1] * dist.get_world_size(control)
    dist.all_gather_object(sizes, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), group=control)
    return math.gcd(*sizes)  # hosts may differ; their common divisor never straddles two
