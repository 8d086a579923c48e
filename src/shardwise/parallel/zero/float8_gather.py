"""Gathers the weights of fp8 layers (nn/float8_linear.py) as the codes they are rounded to.

This halves bf16's bytes and gives the same numbers to the bit: see [Note: rounding twice] in
nn/kernels/pack_float8.py. Only where a parameter has one scale (tensorwise), and only while its
layers train: evaluation uses the model in 16 bits.

[Note: scales of shards] A scale is of a full parameter, sharded over several ranks: the maximum
over all of them of the bf16 values that are gathered (rounding is monotonic, so it is the rounded
maximum of the fp32 masters). One all-reduce takes the maxima of all parameters, at the first gather
after an update, which is the same gather on every rank. With an offloaded optimizer later units are
still being updated then: each unit has its own all-reduce.
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
    """The scales of some layers' weights, the same on every rank; renewed after each update."""

    def __init__(self) -> None:
        self._parameters: list[Any] = []  # FSDP's records, which hold the current shard
        self._stale = True
        self.scales = torch.empty(0)
        self.inverse = torch.empty(0)

    def add(self, parameter: Any) -> int:
        """Registers a parameter; returns the index of its scale."""
        self._parameters.append(parameter)
        return len(self._parameters) - 1

    def forget(self) -> None:
        """Marks the scales as stale, after the parameters changed."""
        self._stale = True

    def renew(self, group: dist.ProcessGroup) -> None:
        """Computes the scales on first use after `forget`; a collective."""
        if not self._stale:
            return
        shards = [local_of(p.sharded_param).detach() for p in self._parameters]
        # Parameters of few rows have no shard on some ranks.
        present = [index for index, shard in enumerate(shards) if shard.numel()]
        zero = torch.zeros((), dtype=shards[0].dtype, device=shards[0].device)
        maxima = [zero] * len(shards)
        if present:
            norms = foreach_norm([shards[index] for index in present], math.inf)
            for index, norm in zip(present, norms, strict=True):
                maxima[index] = norm
        largest = torch.stack(maxima).to(torch.bfloat16).float()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        self.scales = scale_for(largest)
        self.inverse = inverse_for(largest)
        self._stale = False


class Float8Packing:
    """One unit's encoding: weights of fp8 layers as codes, the rest unchanged."""

    def __init__(
        self, layers: Sequence[Float8], parts: Sequence[tuple[int, int]], scales: Scales
    ) -> None:
        self._layers = layers
        self._row = lay_out(parts)
        self._scales = scales

    def takes(self, shard: torch.Tensor) -> bool:
        """Whether the layers round their weights now: in training."""
        return all(layer.training for layer in self._layers)

    def bytes_of(self, shard: torch.Tensor) -> int:
        """Bytes of a rank's encoded shards."""
        return self._row.bytes

    def pack(self, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """A rank's shards encoded as bytes."""
        self._scales.renew(group)
        return pack(shard, self._row, self._scales.inverse)

    def unpack_into(self, slices: torch.Tensor, rows: torch.Tensor) -> None:
        """Decodes the shards of all ranks in place."""
        unpack_into(slices, rows, self._row, self._scales.scales)


def packing_of(unit: FSDPModule, scales: Scales) -> Float8Packing | None:
    """The encoding of a unit's gather, if any of its layers has an fp8 weight of one scale."""
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
    """The layers that round a parameter, if no other module uses it."""
    info = owners_of(parameter)
    modules = [info.module, *info.shared_modules]
    names = {info.param_name, *info.shared_param_names}
    if names != {"weight"} or not all(map(_rounds, modules)):
        return []
    return modules


def _rounds(module: nn.Module) -> bool:
    return isinstance(module, Float8) and module.float8_recipe == "tensorwise"
