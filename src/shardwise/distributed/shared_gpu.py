"""Workarounds for ranks that share one GPU and communicate through gloo, which lacks two operations for GPU tensors.

Point-to-point messages go through the host. DTensor's gather ends the process (a coalesced one, which gloo does not
have): it is replaced by the plain one, which gloo has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.compat.torch_private import resolve_process_group

_TAUGHT: list[torch.library.Library] = []  # a registration lasts as long as its library object


def goes_by_host(group: dist.ProcessGroup) -> bool:
    """Whether messages of a group have to be in host memory."""
    return dist.get_backend(group) == "gloo"


def teach_gathers() -> None:
    """Registers a gather of GPU tensors for DTensor; only for a process whose groups are all gloo's."""
    if not _TAUGHT:
        library = torch.library.Library("_c10d_functional", "IMPL")
        library.impl("all_gather_into_tensor", _gather, "CUDA")
        _TAUGHT.append(library)


def _gather(tensor: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    """The operator's semantics: concatenates the tensors of all ranks along the first dimension; synchronous."""
    tensor = tensor.contiguous()
    out = tensor.new_empty((group_size * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather(list(out.chunk(group_size)), tensor, group=resolve_process_group(group_name))
    return out
