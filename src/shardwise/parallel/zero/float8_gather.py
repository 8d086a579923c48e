"""Gathers of layers that multiply in fp8 (nn/float8_linear.py): their weights travel as the codes they are rounded to.

Half of bf16's bytes, and the same numbers to the bit: see [Note: rounding twice] in nn/kernels/pack_float8.py. Only
where a parameter has one scale (tensorwise), and only while its layers train: evaluated is the model in 16 bits.

[Note: scales of shards] A scale is of a whole parameter, whose shards lie on several ranks: the largest value over all
of them, of the bf16 that is gathered (rounding keeps order, so that of the fp32 masters, rounded). All parameters'
largest values are compared in one all-reduce, at the first gather after an update, which is the same gather on every
rank. With an optimizer off the device later units are still being updated then: each unit has its own all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.core.compat.torch_private import foreach_norm, owners_of, parameter_groups
from shardwise.nn.float8_linear import Float8
from shardwise.nn.kernels.float8 import inverse_for, scale_for
from shardwise.nn.kernels.pack_float8 import lay_out, pack, unpack_into
from shardwise.optim.shards import local_of


class Scales:
    """What the weights of some layers are divided by, the same on every rank; renewed after each update."""

    def __init__(self) -> None:
        self._parameters: list[Any] = []  # FSDP's records, which know the present shard
        self._stale = True
        self.scales = self.inverse = torch.empty(0)

    def add(self, parameter: Any) -> int:
        """The number that a parameter's scale will have."""
        self._parameters.append(parameter)
        return len(self._parameters) - 1

    def forget(self) -> None:
        """The parameters are no longer those that the scales are of."""
        self._stale = True

    def renew(self, group: dist.ProcessGroup) -> None:
        """Collective, on first use after `forget`."""
        if not self._stale:
            return
        shards = [local_of(p.sharded_param).detach() for p in self._parameters]
        there = [shard for shard in shards if shard.numel()]  # of few rows, some ranks have none
        found = iter(foreach_norm(there, math.inf) if there else ())
        none = torch.zeros((), dtype=shards[0].dtype, device=shards[0].device)
        largest = torch.stack([next(found) if shard.numel() else none for shard in shards])
        largest = largest.to(torch.bfloat16).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        self.scales, self.inverse, self._stale = scale_for(largest), inverse_for(largest), False


class Float8Packing:
    """One unit's way on the wire: weights of fp8 layers as codes, the rest as it is."""

    def __init__(
        self, layers: Sequence[Float8], parts: Sequence[tuple[int, int]], scales: Scales
    ) -> None:
        self._layers, self._row, self._scales = layers, lay_out(parts), scales

    def takes(self, shard: torch.Tensor) -> bool:
        """Whether what is gathered now will be rounded."""
        return all(layer.training for layer in self._layers)

    def bytes_of(self, shard: torch.Tensor) -> int:
        """What a rank's shards take on the wire."""
        return self._row.bytes

    def pack(self, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """A rank's shards as bytes."""
        self._scales.renew(group)
        return pack(shard, self._row, self._scales.inverse)

    def unpack_into(self, slices: torch.Tensor, rows: torch.Tensor) -> None:
        """Every rank's shards, in place."""
        unpack_into(slices, rows, self._row, self._scales.scales)


def packing_of(unit: FSDPModule, scales: Scales) -> Float8Packing | None:
    """How a unit's gather can travel, if any of its layers multiplies in fp8 with one scale per weight."""
    layers: list[Float8] = []
    parts: list[tuple[int, int]] = []
    for group in parameter_groups(unit):
        for parameter in group.fsdp_params:
            users = _users(parameter)
            layers += users
            number = scales.add(parameter) if users else -1
            parts.append((math.prod(parameter.padded_sharded_param_size), number))
    return Float8Packing(layers, parts, scales) if layers else None


def _users(parameter: Any) -> list[Float8]:
    """The layers that round a parameter, if nobody else has it."""
    info = owners_of(parameter)
    modules = [info.module, *info.shared_modules]
    names = {info.param_name, *info.shared_param_names}
    return modules if names == {"weight"} and all(map(_rounds, modules)) else []


def _rounds(module: nn.Module) -> bool:
    return isinstance(module, Float8) and module.float8_recipe == "tensorwise"
