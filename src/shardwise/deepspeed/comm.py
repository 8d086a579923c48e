"""`deepspeed.comm`: torch.distributed under DeepSpeed's names."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from shardwise.core.compat.torch_private import HashStore
from shardwise.deepspeed.refused import refuse

__all__ = ["ReduceOp", "get_local_rank", "get_rank", "get_world_group", "get_world_size", "init_distributed"]

PORT = 29500
WANTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta = timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Joins the process group described by the launcher; a single process needs no launcher."""
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise refuse("init_distributed(dist_init_required=False)", "join a process group before, or leave it out")
    if dist_backend not in (None, "nccl", "gloo", "ccl"):
        raise refuse(f"init_distributed(dist_backend={dist_backend!r})", "use nccl or gloo, or leave it out")
    cuda = torch.cuda.is_available() and dist_backend != "gloo"
    if cuda:
        torch.cuda.set_device(get_local_rank() % torch.cuda.device_count())
    # gloo beside NCCL: what zero.Init divides lies in host memory.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    rank = int(os.environ.get("RANK", 0)) if rank < 0 else rank
    world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size < 0 else world_size
    if world_size > 1 and init_method is None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        lacking = [name for name in WANTED if name not in os.environ]
        if lacking:
            remedy = "start the script with `shardwise deepspeed`, torchrun or another launcher that sets them"
            raise refuse(f"init_distributed without {', '.join(lacking)}", remedy)
    store = HashStore() if world_size == 1 and init_method is None else None
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout, store=store
    )


def get_rank(group: Any = None) -> int:
    """Rank of this process."""
    return dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """Number of ranks."""
    return dist.get_world_size(group)


def get_local_rank() -> int:
    """Rank of this process on its host."""
    return int(os.environ.get("LOCAL_RANK", 0))


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def has_all_gather_into_tensor() -> bool:
    """Always True: torch.distributed has it."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Always True: torch.distributed has it."""
    return True


def __getattr__(name: str) -> Any:
    """Forwards other names to torch.distributed."""
    if name in ("log_summary", "configure", "initialize_mesh_device"):
        raise refuse(f"comm.{name}", 'set "comms_logger" in the config')
    return getattr(dist, name)
