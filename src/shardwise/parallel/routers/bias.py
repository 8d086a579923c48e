"""Auxiliary-loss-free balancing: a bias on expert selection moves towards experts with few tokens.

After each step b += rate · sign(mean load − load), from the tokens of all ranks and micro-batches
of the step (DeepSeek-V3, arXiv 2412.19437). No gradient is involved, so a bias is a buffer: each
rank has all of it, in fp32, and checkpoints and exports contain it.
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
    """The bias of one layer: where it is, and the layer's row of the counts."""

    owner: nn.Module
    name: str
    row: int

    @property
    def tensor(self) -> torch.Tensor:
        """The current buffer; sharding and moving to a device replace it."""
        buffer = self.owner._buffers[self.name]
        assert buffer is not None
        return buffer


class BiasUpdate:
    """Updates the biases of a model after each step.

    `patterns` are those of `find_biases`. The counts are summed over `mesh`, the ranks that have
    other tokens of the same layers.
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
        self.biases = find_biases(model, patterns, loads)  # of this rank's layers
        self._loads = loads
        self._mesh = mesh
        self.rate = rate

    @torch.no_grad()
    def __call__(self, taken: torch.Tensor | bool = True) -> None:
        """Updates after a step; `taken`: whether it changed the parameters (a tensor: 0 or 1)."""
        counts = self._loads.end_step()
        for axis in range(self._mesh.ndim):
            if self._mesh.size(axis) > 1:
                dist.all_reduce(counts, group=self._mesh.get_group(axis))
        if taken is False:
            return
        for bias in self.biases.values():
            tensor = bias.tensor
            load = counts[bias.row, : tensor.numel()].to(tensor.dtype)
            change = self.rate * (load.mean() - load).sign()
            if taken is not True:
                change = change * taken
            tensor += change.view_as(tensor)


def find_biases(
    model: nn.Module, patterns: Mapping[str, str], loads: ExpertLoads
) -> dict[str, Bias]:
    """The biases of this rank's layers, by name; frozen parameters become fp32 buffers.

    `patterns` maps name patterns of stacks of experts to those of their biases.
    """
    rows = {}
    for row, layer in enumerate(loads.layers):
        rows[pattern_of(layer) + _numbers(layer)] = row
    stacks = {bias: stack for stack, bias in patterns.items()}
    biases: dict[str, Bias] = {}
    tensors: dict[str, Any] = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        stack = stacks.get(pattern_of(name))
        if stack is None or stack + _numbers(name) not in rows:
            continue
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if leaf in owner._parameters:
            del owner._parameters[leaf]
            owner.register_buffer(leaf, torch.zeros(tensor.shape))  # values come with the weights
        biases[name] = Bias(owner, leaf, rows[stack + _numbers(name)])
    return biases


def _numbers(name: str) -> str:
    """The layer numbers in a module's name, concatenated."""
    return "".join(re.findall(r"\.(\d+)(?=\.|$)", name))
