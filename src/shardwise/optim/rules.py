"""Elementwise update rules: plain functions on lists of fp32 tensors, in place.

They are independent of shards, storage and devices, so that states on the device, on the host and in files are updated
by the same arithmetic. Weight decay is decoupled in all of them (each step shrinks the weight by rate × decay), so
that `train.weight_decay` means the same for every optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.core.compat.torch_private import (
    foreach_add_,
    foreach_lerp,
    foreach_lerp_,
    foreach_mul_,
    foreach_sign_,
    fused_adamw_,
)

States = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of a step; `step` counts from 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int


class UpdateRule(Protocol):
    """One step on tensors and their states, all fp32, all changed in place; gradients are only read."""

    states: tuple[str, ...]

    def __call__(self, params: list[Tensor], grads: list[Tensor], states: States, hyper: Hyper) -> None: ...


class AdamW:
    """AdamW by the operator behind torch.optim.AdamW(fused=True), hence bit-equal to it."""

    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __call__(self, params: list[Tensor], grads: list[Tensor], states: States, hyper: Hyper) -> None:
        if not params:
            return
        step = torch.full((), float(hyper.step), device=params[0].device)
        fused_adamw_(
            params,
            grads,
            states["exp_avg"],
            states["exp_avg_sq"],
            [],
            [step] * len(params),
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )


class Lion:
    """Lion: moves every element by the rate, in the direction of the sign of a mean of gradients."""

    states: tuple[str, ...] = ("exp_avg",)

    def __call__(self, params: list[Tensor], grads: list[Tensor], states: States, hyper: Hyper) -> None:
        if not params:
            return
        means = states["exp_avg"]
        beta1, beta2 = hyper.betas
        update = foreach_lerp(means, grads, 1 - beta1)
        foreach_sign_(update)
        _decay(params, hyper)
        foreach_add_(params, update, alpha=-hyper.lr)
        foreach_lerp_(means, grads, 1 - beta2)


class Momentum:
    """SGD with heavy-ball momentum betas[0]; betas[1] and eps are not used."""

    states: tuple[str, ...] = ("momentum_buffer",)

    def __call__(self, params: list[Tensor], grads: list[Tensor], states: States, hyper: Hyper) -> None:
        if not params:
            return
        buffers = states["momentum_buffer"]
        foreach_mul_(buffers, hyper.betas[0])
        foreach_add_(buffers, grads)
        _decay(params, hyper)
        foreach_add_(params, buffers, alpha=-hyper.lr)


class Descent:
    """SGD without momentum, which has no state."""

    states: tuple[str, ...] = ()

    def __call__(self, params: list[Tensor], grads: list[Tensor], states: States, hyper: Hyper) -> None:
        if not params:
            return
        _decay(params, hyper)
        foreach_add_(params, grads, alpha=-hyper.lr)


def _decay(params: list[Tensor], hyper: Hyper) -> None:
    if hyper.weight_decay:
        foreach_mul_(params, 1 - hyper.lr * hyper.weight_decay)


RULES: dict[str, UpdateRule] = {"adamw": AdamW(), "lion": Lion(), "sgd": Momentum()}


def rule_of(optimizer: str, betas: tuple[float, float]) -> UpdateRule:
    """Returns the rule of an optimizer by its name in the config; SGD with momentum 0 needs no buffer."""
    if optimizer == "sgd" and betas[0] == 0:
        return Descent()
    return RULES[optimizer.removesuffix("8bit").removesuffix("4bit")]
