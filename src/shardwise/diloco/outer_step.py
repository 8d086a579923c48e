"""The outer step: combines the workers' differences, part by part.

A difference is (parameters at the start of the round) - (a worker's parameters now): a pseudo-gradient. DiLoCo gives
their mean to SGD with Nesterov momentum; FedAvg is rate 1 without momentum, weighted by each worker's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shardwise.diloco.codec import Dtype


@dataclass(frozen=True)
class OuterRule:
    """Settings of the outer step; the sync server's, sent to workers that join."""

    optimizer: Literal["nesterov", "sgd"] = "nesterov"
    rate: float = 0.7
    momentum: float = 0.9
    weight: Literal["equal", "tokens"] = "equal"
    dtype: Dtype = "fp32"
    wait: float = 60.0
    least: int = 1


METHODS = {"diloco": OuterRule(), "fedavg": OuterRule("sgd", 1.0, 0.0, "tokens")}


def weights_of(rule: OuterRule, tokens: Sequence[int]) -> list[float]:
    """Each worker's weight in the mean; they sum to 1. Workers without tokens have weight 0."""
    counts = [1.0 if rule.weight == "equal" else float(n) for n in tokens]
    total = sum(counts)
    return [c / total for c in counts] if total else [1.0 / len(counts)] * len(counts)


def mean_of(differences: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted mean, in fp64, so that order and rounding do not matter."""
    total = torch.zeros(differences[0].shape, dtype=torch.float64)
    for difference, weight in zip(differences, weights, strict=True):
        total.add_(difference.double(), alpha=weight)
    return total


def outer_step(
    parameters: torch.Tensor, velocity: torch.Tensor | None, mean: torch.Tensor, rule: OuterRule
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """New parameters and momentum, both fp32; the momentum of a first step is its gradient, as in torch's SGD."""
    step = mean
    if rule.momentum:
        moved = mean if velocity is None else velocity.double() * rule.momentum + mean
        step = mean + moved * rule.momentum if rule.optimizer == "nesterov" else moved
        velocity = moved.float()
    return (parameters.double() - step * rule.rate).float(), velocity if rule.momentum else None
