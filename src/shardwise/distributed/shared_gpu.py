"""Ranks that share one GPU talk through gloo, which lacks two things for tensors on a GPU: these are made up for here.

Messages between two ranks go by way of the host. The gather that DTensor asks for ends the process (a coalesced one
of which gloo has none): the plain one, which gloo does have, takes its place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.compat.torch_private import resolve_process_group

_TAUGHT: list[torch.library.Library] = []  # a registration lasts as long as its library object


def goes_by_host(group: dist.ProcessGroup) -> bool:
    """Whether messages of a group have to lie in host memory."""
    return dist.get_backend(group) == "gloo"


def teach_gathers() -> None:
    """Gives DTensor a gather for tensors on a GPU; only for a process whose groups are all gloo's."""
    if not _TAUGHT:
        library = torch.library.Library("_c10d_functional", "IMPL")
        library.impl("all_gather_into_tensor", _gather, "CUDA")
        _TAUGHT.append(library)


def _gather(mine: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    """The operator's meaning: everyone's tensor, one after another along the first dimension; done on return."""
    mine = mine.contiguous()
    out = mine.new_empty((group_size * mine.shape[0], *mine.shape[1:]))
    dist.all_gather(list(out.chunk(group_size)), mine, group=resolve_process_group(group_name))
    return out
