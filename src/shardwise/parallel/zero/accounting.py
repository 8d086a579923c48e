"""What a rank holds and sends, counted and predicted: the figures that tests compare with the ZeRO formulas."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise.core.compat.torch_private import (
    TorchDispatchMode,
    is_group_object,
    local_tensor,
    parameter_groups,
    partial_reduction,
    resolve_process_group,
    schema_of,
    storage_key,
    unsharded_parameter,
)
from shardwise.parallel.zero.stages import ShardedModel


def predicted_bytes(parameters: int, stage: int, shard: int, precision: str) -> dict[str, float]:
    """Bytes per rank while gradients are accumulated, by ZeRO's formulas with fp32 reduction (gradients 4 bytes).

    "parameters" are the working copies (2 bytes in mixed precision); "optimizer" is the fp32 master and two moments.
    At stage 3 the working copies of one block at a time come on top; they are not held.
    """
    working = {"fp32": 4, "bf16": 2, "fp16": 2}[precision]
    divided = parameters / shard
    return {
        "parameters": working * parameters if stage < 3 else 0,
        "gradients": 4 * parameters if stage < 2 else 4 * divided,
        "optimizer": 12 * (parameters if stage == 0 else divided),
    }


def held_bytes(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of storage this rank holds now, by the categories of `predicted_bytes`, and of frozen parameters if any."""
    masters: list[Any] = []
    working: list[Any] = []
    gradients: list[Any] = []
    plain = [p for p in sharded.model.parameters() if not isinstance(p, DTensor)]
    frozen: list[Any] = [p for p in plain if not p.requires_grad]
    working += [p for p in plain if p.requires_grad]
    gradients += [p.grad for p in plain if p.requires_grad]
    for unit in sharded.model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in parameter_groups(unit):
            for fp in group.fsdp_params:
                (masters if fp.sharded_param.requires_grad else frozen).append(fp.sharded_param)
                working += fp.all_gather_outputs
                gradients += [fp.sharded_param.grad, fp.unsharded_accumulated_grad]
                if (unsharded := unsharded_parameter(fp)) is not None:
                    gradients.append(unsharded.grad)
            gradients.append(partial_reduction(group))
    moments = [
        v
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor) and v.ndim
    ]
    held = {
        "parameters": _storage(working),
        "gradients": _storage(gradients),
        "optimizer": _storage(masters) + _storage(moments),
    }
    return held | ({"frozen": _storage(frozen)} if frozen else {})


def _storage(tensors: list[Any]) -> int:
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        seen[storage_key(storage)] = storage.nbytes()
    return sum(seen.values())


PLAIN = {  # of which argument, and how often, each counts
    "_allgather_base": ("all_gather", 0, 1),
    "_reduce_scatter_base": ("reduce_scatter", 1, 1),
    "alltoall_base": ("all_to_all", 1, 1),
    "allreduce": ("all_reduce", 0, 2),
}
FUNCTIONAL = {  # how often, and of what, each counts
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 1, "output"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "_c10d_functional::all_reduce": ("all_reduce", 2, "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", 1, "input"),
}


@dataclass(frozen=True)
class Collective:
    """One collective of a rank: what it moves (an all-reduce counts twice), and among which ranks."""

    kind: str
    bytes: int
    elements: int
    ranks: tuple[int, ...]


def collective_of(func: Any, args: Any, result: Any) -> Collective | None:
    """What an operator moves between ranks, if it is a collective of more than one."""
    name = schema_of(func).name
    if name in FUNCTIONAL:  # what DTensor calls
        kind, times, of = FUNCTIONAL[name]
        return _collective(
            kind, [args[0] if of == "input" else result], times, _named_ranks(args[-1])
        )
    if (
        not name.startswith("c10d::") or len(ranks := _group_ranks(args)) < 2
    ):  # a group of one moves nothing
        return None
    name = name.removeprefix("c10d::")
    for start, (kind, argument, times) in PLAIN.items():
        if name.startswith(start):
            tensors = (
                args[argument] if isinstance(args[argument], (list, tuple)) else [args[argument]]
            )
            return _collective(kind, tensors, times, ranks)
    lists = [a if isinstance(a, (list, tuple)) else [a] for a in args]
    return _collective(
        name, [a for one in lists for a in one if isinstance(a, torch.Tensor)], 1, ranks
    )


def _collective(kind: str, tensors: Any, times: int, ranks: list[int]) -> Collective:
    elements = [t.numel() for t in tensors]
    size = sum(n * t.element_size() for n, t in zip(elements, tensors, strict=True))
    return Collective(kind, times * size, times * sum(elements), tuple(ranks))


class WireCount(TorchDispatchMode):
    """Counts what each collective moves per rank: all-gather its output, reduce-scatter its input, all-reduce twice.

    `across` is the part of the bytes that belongs to ranks on other nodes, of `node` consecutive ranks each.
    """

    def __init__(self, node: int = 1) -> None:
        super().__init__()
        self._node = node
        self.elements: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.across: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (found := collective_of(func, args, result)) is not None:
            here = dist.get_rank() // self._node
            outside = sum(r // self._node != here for r in found.ranks) / len(found.ranks)
            self.elements[found.kind] += found.elements
            self.bytes[found.kind] += found.bytes
            self.across[found.kind] += round(found.bytes * outside)
        return result


def _named_ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(resolve_process_group(group))


def _group_ranks(args: Any) -> list[int]:
    for arg in args:
        if is_group_object(arg):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))
    return list(range(dist.get_world_size()))
