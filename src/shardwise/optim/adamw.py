"""AdamW over sharded parameters: norms and biases are not decayed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.config.schema import Train


def decay_groups(
    parameters: Mapping[str, nn.Parameter], weight_decay: float, norms: bool = False
) -> list[dict[str, object]]:
    """Two groups: matrices and embeddings with decay; norms and biases (one dim or none) without, unless `norms`."""
    decayed = [p for p in parameters.values() if p.ndim >= 2 or norms]
    plain = [p for p in parameters.values() if p.ndim < 2 and not norms]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def build_optimizer(parameters: Mapping[str, nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """The optimizer the run asks for, over the sharded fp32 masters."""
    groups = decay_groups(parameters, train.weight_decay, train.decay_norms)
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas, eps=train.eps, fused=True)
