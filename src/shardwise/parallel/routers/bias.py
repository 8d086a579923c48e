"""Balancing without a loss: a bias decides which experts are chosen, and moves towards those with too few tokens.

After each step b += rate · sign(mean load − load), from the tokens of all ranks and micro-batches of the step
(DeepSeek-V3, arXiv 2412.19437). No gradient has a part in it, so a bias is a buffer: each rank has all of it, in fp32,
and checkpoints and exports hold it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.parallel.expert.load_counts import ExpertLoads
from shardwise.parallel.tensor.roles import pattern_of


@dataclass(frozen=True)
class Bias:
    """One layer's: where it is, and the row of its experts among the counts."""

    owner: nn.Module
    name: str
    row: int

    @property
    def tensor(self) -> torch.Tensor:
        """As it is now; sharding and moving to a device make new ones."""
        found = self.owner._buffers[self.name]
        assert found is not None
        return found


class BiasUpdate:
    """Moves the biases of a model after each step; `mesh`: ranks with other tokens of the same layers.

    `patterns`: as of `find_biases`.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Mapping[str, str],
        loads: ExpertLoads,
        mesh: DeviceMesh,
        rate: float,
    ) -> None:
        self.patterns = tuple(patterns.values())
        self.biases = find_biases(model, patterns, loads)  # of the layers that this rank has
        self._loads, self._mesh, self._rate = loads, mesh, rate

    @torch.no_grad()
    def __call__(self, taken: torch.Tensor | bool = True) -> None:
        """After a step; `taken`: whether it changed the parameters, on the host or (0 or 1) on the device."""
        counts = self._loads.end_step()
        for axis in range(self._mesh.ndim):
            if self._mesh.size(axis) > 1:
                dist.all_reduce(counts, group=self._mesh.get_group(axis))
        if taken is False:
            return
        for bias in self.biases.values():
            tensor = bias.tensor
            load = counts[bias.row, : tensor.numel()].to(tensor.dtype)
            moved = self._rate * (load.mean() - load).sign()
            tensor += (moved if taken is True else moved * taken).view_as(tensor)


def find_biases(
    model: nn.Module, patterns: Mapping[str, str], loads: ExpertLoads
) -> dict[str, Bias]:
    """The biases of a model by name, of the layers that this rank has; a frozen parameter becomes a buffer in fp32.

    `patterns`: of biases, by those of the experts that they are for.
    """
    rows = {
        pattern_of(layer) + "".join(_numbers(layer)): row for row, layer in enumerate(loads.layers)
    }
    experts = {bias: stack for stack, bias in patterns.items()}
    found: dict[str, Bias] = {}
    tensors: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        stack = experts.get(pattern_of(name))
        row = None if stack is None else rows.get(stack + "".join(_numbers(name)))
        if row is None:
            continue
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if leaf in owner._parameters:
            del owner._parameters[leaf]
            owner.register_buffer(leaf, torch.zeros(tensor.shape))  # values come with the weights
        found[name] = Bias(owner, leaf, row)
    return found


def _numbers(name: str) -> list[str]:
    """Of the layers that a name goes through."""
    return re.findall(r"\.(\d+)(?=\.|$)", name)
