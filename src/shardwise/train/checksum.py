"""Silent corruption: compares replicas of the same weights and states, bit for bit, every N steps.

Replicas that received the same updates are equal to the last bit. Where one differs, memory or a
computation has failed on its rank, and every later step would carry that on. Ranks exchange one sum
per tensor, not the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.optim.shards import local_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A 64-bit sum of each tensor's bits, in order, on the host."""
    on_device = [_bits(local_of(tensor)).sum(dtype=torch.int64) for tensor in tensors]
    if not on_device:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([value.cpu() for value in on_device])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()])


def differing(tensors: dict[str, Any], group: dist.ProcessGroup, control: dist.ProcessGroup) -> str:
    """Describes a rank's copy that differs from the others in `group`; "" if all are equal.

    Returns the same on every rank of `control`.
    """
    names = [name for name, value in tensors.items() if isinstance(value, torch.Tensor)]
    local_sums = dict(zip(names, sums(tensors[name] for name in names).tolist(), strict=True))
    sums_by_rank = _gathered(local_sums, control)  # on the host: the devices' links may be at fault
    ranks = dist.get_process_group_ranks(group)
    difference = ""
    for name in names:
        difference = _difference(name, {rank: sums_by_rank[rank].get(name) for rank in ranks})
        if difference:
            break
    return next(filter(None, _gathered(difference, control)), "")


def _difference(name: str, values: dict[int, Any]) -> str:
    usual, others = Counter(values.values()).most_common(1)[0]
    for rank, value in values.items():
        if value != usual:
            plural = "s" if others > 1 else ""
            return f"rank {rank}'s copy of {name} differs from that of {others} other{plural}"
    return ""


def _gathered(value: Any, control: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(values, value, group=control)
    return values
