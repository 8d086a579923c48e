"""What a rank holds and sends, counted and predicted: the figures that tests compare with the ZeRO formulas."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.zero.stages import ShardedModel, parameter_groups


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
    frozen: list[Any] = [p for p in sharded.model.parameters() if not p.requires_grad and not isinstance(p, DTensor)]
    for unit in sharded.model.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for group in parameter_groups(unit):
            for fp in group.fsdp_params:
                (masters if fp.sharded_param.requires_grad else frozen).append(fp.sharded_param)
                working += fp.all_gather_outputs
                gradients += [fp.sharded_param.grad, fp.unsharded_accumulated_grad]
                if hasattr(fp, "_unsharded_param"):
                    gradients.append(fp._unsharded_param.grad)
            gradients.append(getattr(group, "_partial_reduce_output", None))
    moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.ndim]
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
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


FUNCTIONAL = {  # how often, and of what, each counts
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 1, "output"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "_c10d_functional::all_reduce": ("all_reduce", 2, "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", 1, "input"),
}


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
        name = func._schema.name
        if name.startswith("c10d::") and len(ranks := _group_ranks(args)) > 1:  # a group of one moves nothing
            here = dist.get_rank() // self._node
            self._count(name.removeprefix("c10d::"), args, sum(r // self._node != here for r in ranks) / len(ranks))
        result = func(*args, **(kwargs or {}))
        if name in FUNCTIONAL:  # what DTensor calls
            kind, times, of = FUNCTIONAL[name]
            self._add(kind, [args[0] if of == "input" else result], times, 0.0)
        return result

    def _count(self, name: str, args: Any, outside: float) -> None:
        if name.startswith("_allgather_base"):
            self._add("all_gather", [args[0]], 1, outside)
        elif name.startswith("_reduce_scatter_base"):
            self._add("reduce_scatter", [args[1]], 1, outside)
        elif name.startswith("alltoall_base"):
            self._add("all_to_all", [args[1]], 1, outside)
        elif name.startswith("allreduce"):
            self._add("all_reduce", args[0] if isinstance(args[0], (list, tuple)) else [args[0]], 2, outside)
        else:
            lists = [a if isinstance(a, (list, tuple)) else [a] for a in args]
            self._add(name, [a for one in lists for a in one if isinstance(a, torch.Tensor)], 1, outside)

    def _add(self, name: str, tensors: Any, times: int, outside: float) -> None:
        for tensor in tensors:
            size = times * tensor.numel() * tensor.element_size()
            self.elements[name] += times * tensor.numel()
            self.bytes[name] += size
            self.across[name] += round(size * outside)


def _group_ranks(args: Any) -> list[int]:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):  # type: ignore[attr-defined]
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg))
    return list(range(dist.get_world_size()))
