"""Gradients that leave the device: one norm for each parameter on every rank."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.parallel.offload.gradients import GradientOffloadBuffer


def test_an_empty_part_has_a_norm() -> None:
    """A classifier of two rows on four ranks: the last two have none of it, and still take part in the sum of norms."""
    shelf, parameter = GradientOffloadBuffer([], torch.device("cpu"), None), nn.Parameter(torch.empty(0, 3))
    shelf.add(parameter, torch.empty(0, 3), last=False)
    assert shelf.add(parameter, torch.empty(0, 3), last=True).item() == 0.0
    assert parameter in shelf.seen
