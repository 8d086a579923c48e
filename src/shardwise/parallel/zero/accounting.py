"""Memory and traffic of a rank, measured and predicted: tests compare them by ZeRO's formulas."""

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
    """Bytes per rank while gradients accumulate, by ZeRO's formulas with fp32 reduction.

    "parameters" are the working copies (2 bytes in mixed precision), "gradients" take 4 bytes, and
    "optimizer" is the fp32 master and two moments. At stage 3 the working copies of one block at a
    time come on top; they do not stay.
    """
    working = {"fp32": 4, "bf16": 2, "fp16": 2}[precision]
    sharded = parameters / shard
    return {
        "parameters": working * parameters if stage < 3 else 0,
        "gradients": 4 * (parameters if stage < 2 else sharded),
        "optimizer": 12 * (parameters if stage == 0 else sharded),
    }


def held_bytes(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of storage this rank holds now, by category of `predicted_bytes`, or "frozen"."""
    masters: list[Any] = []
    working: list[Any] = []
    gradients: list[Any] = []
    frozen: list[Any] = []
    for parameter in sharded.model.parameters():
        if isinstance(parameter, DTensor):
            continue
        if parameter.requires_grad:
            working.append(parameter)
            gradients.append(parameter.grad)
        else:
            frozen.append(parameter)
    for unit in sharded.model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in parameter_groups(unit):
            for fp in group.fsdp_params:
                if fp.sharded_param.requires_grad:
                    masters.append(fp.sharded_param)
                else:
                    frozen.append(fp.sharded_param)
                working += fp.all_gather_outputs
                gradients += [fp.sharded_param.grad, fp.unsharded_accumulated_grad]
                unsharded = unsharded_parameter(fp)
                if unsharded is not None:
                    gradients.append(unsharded.grad)
            gradients.append(partial_reduction(group))
    moments: list[Any] = []
    for state in optimizer.state.values():
        moments += [v for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
    held = {
        "parameters": _storage(working),
        "gradients": _storage(gradients),
        "optimizer": _storage(masters) + _storage(moments),
    }
    if frozen:
        held["frozen"] = _storage(frozen)
    return held


def _storage(tensors: list[Any]) -> int:
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor is None:
            continue
        if isinstance(tensor, DTensor):
            tensor = local_tensor(tensor)
        storage = tensor.untyped_storage()
        seen[storage_key(storage)] = storage.nbytes()
    return sum(seen.values())


PLAIN = {  # kind, index of the argument that counts, and how often it counts
    "_allgather_base": ("all_gather", 0, 1),
    "_reduce_scatter_base": ("reduce_scatter", 1, 1),
    "alltoall_base": ("all_to_all", 1, 1),
    "allreduce": ("all_reduce", 0, 2),
}
FUNCTIONAL = {  # kind, how often it counts, and whether by its input or its output
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 1, "output"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "_c10d_functional::all_reduce": ("all_reduce", 2, "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", 1, "input"),
}


@dataclass(frozen=True)
class Collective:
    """One collective of a rank: what it moves (an all-reduce counts twice), and its ranks."""

    kind: str
    bytes: int
    elements: int
    ranks: tuple[int, ...]


def collective_of(func: Any, args: Any, result: Any) -> Collective | None:
    """The collective that an operator runs, if it is one of several ranks."""
    name = schema_of(func).name
    if name in FUNCTIONAL:  # what DTensor calls
        kind, times, counted = FUNCTIONAL[name]
        tensor = args[0] if counted == "input" else result
        return _collective(kind, [tensor], times, _named_ranks(args[-1]))
    if not name.startswith("c10d::"):
        return None
    ranks = _group_ranks(args)
    if len(ranks) < 2:  # a group of one moves nothing
        return None
    name = name.removeprefix("c10d::")
    for start, (kind, argument, times) in PLAIN.items():
        if name.startswith(start):
            return _collective(kind, _as_list(args[argument]), times, ranks)
    tensors: list[Any] = []
    for arg in args:
        tensors += [a for a in _as_list(arg) if isinstance(a, torch.Tensor)]
    return _collective(name, tensors, 1, ranks)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _collective(kind: str, tensors: Any, times: int, ranks: list[int]) -> Collective:
    elements = [t.numel() for t in tensors]
    size = sum(n * t.element_size() for n, t in zip(elements, tensors, strict=True))
    return Collective(kind, times * size, times * sum(elements), tuple(ranks))


class WireCount(TorchDispatchMode):
    """Counts elements and bytes per rank and kind of collective.

    An all-gather counts its output, a reduce-scatter its input, an all-reduce twice. `across` is
    the part of the bytes that belongs to ranks on other nodes of `node` consecutive ranks each.
    """

    def __init__(self, node: int = 1) -> None:
        super().__init__()
        self._node = node
        self.elements: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.across: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        collective = collective_of(func, args, result)
        if collective is not None:
            kind = collective.kind
            ranks = collective.ranks
            own_node = dist.get_rank() // self._node
            outside = sum(r // self._node != own_node for r in ranks) / len(ranks)
            self.elements[kind] += collective.elements
            self.bytes[kind] += collective.bytes
            self.across[kind] += round(collective.bytes * outside)
        return result


def _named_ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(resolve_process_group(group))


def _group_ranks(args: Any) -> list[int]:
    for arg in args:
        if is_group_object(arg):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))
    return list(range(dist.get_world_size()))
