"""Silent corruption: replicas of the same weights and states are compared now and then, bit for bit.

Copies that were updated alike are alike to the last bit. Where one differs, memory or a computation has failed on its
rank, and every later step would carry that on. One sum per tensor travels, not the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.optim.shards import local_of

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A 64-bit sum of each tensor's bits, in order, on the host."""
    found = [_bits(local_of(tensor)).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack([one.cpu() for one in found]) if found else torch.zeros(0, dtype=torch.int64)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(_WHOLE[tensor.element_size()])


def differing(tensors: dict[str, Any], group: dist.ProcessGroup, control: dist.ProcessGroup) -> str:
    """What to tell if one rank's copy differs from the others' of `group`, on every rank; "" if all are alike."""
    names = [name for name, value in tensors.items() if isinstance(value, torch.Tensor)]
    mine = dict(zip(names, sums(tensors[name] for name in names).tolist(), strict=True))
    ranks = dist.get_process_group_ranks(group)
    everyone = _told(mine, control)  # on the host: the devices' links may be what fails
    odd = next(
        (said for name in names if (said := _odd(name, {r: everyone[r].get(name) for r in ranks}))),
        "",
    )
    return next((one for one in _told(odd, control) if one), "")


def _odd(name: str, values: dict[int, Any]) -> str:
    usual, others = Counter(values.values()).most_common(1)[0]
    rank = next((rank for rank, value in values.items() if value != usual), None)
    if rank is None:
        return ""
    return f"rank {rank}'s copy of {name} differs from that of {others} other{'s' * (others > 1)}"


def _told(mine: Any, control: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(everyone, mine, group=control)
    return everyone
