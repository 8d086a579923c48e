"""One update of the parameters: unscale, norm, clip, step; or, eagerly, each parameter once its gradient is known.

The loop and the engine call it once per optimizer step, after the last micro-batch's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.optim.adam_mini import AdamMini
from shardwise.optim.elementwise import Elementwise
from shardwise.optim.norms import norm_of
from shardwise.optim.shards import local_of
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.zero.stages import ShardedModel


class Update:
    """Steps an optimizer over a sharded model's parameters.

    `eager` is the share of the parameters that is updated during backward, their gradients freed at once; the norm is
    then known only afterwards, so there is no clipping and no loss scale. Only an offloaded optimizer tells 0.5 from 1.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer,
        scaler: Any,
        clip: float | None,
        eager: float,
        accumulates: bool = True,
        settle: Callable[[], None] = lambda: None,
        then: Callable[[torch.Tensor | bool], None] = lambda taken: None,
    ) -> None:
        """`settle` is called before anything changes: what is being saved may still be on its way to the host.

        `then` is called after each step, with whether it changed the parameters (0 or 1 on the device, or a bool).
        """
        assert not (eager and (clip is not None or scaler.is_enabled())), (
            "the config is checked before"
        )
        self.sharded, self.optimizer, self.scaler, self.clip, self.eager = (
            sharded,
            optimizer,
            scaler,
            clip,
            eager,
        )
        self._offloaded = optimizer if isinstance(optimizer, OffloadedOptimizer) else None
        self.settle, self._then = settle, then
        self._squares: list[torch.Tensor] = []
        if self._offloaded is not None:
            self._offloaded.attach(sharded, self._known if eager else None, accumulates, eager)
        elif eager:
            self._group_of = {p: g for g in optimizer.param_groups for p in g["params"]}
            for parameter in sharded.parameters.values():
                parameter.register_post_accumulate_grad_hook(self._step_one)

    @property
    def consumes(self) -> bool:
        """Whether gradients may be gone before the update is asked for."""
        return self._offloaded is not None or bool(self.eager)

    def __call__(self, allowed: Callable[[torch.Tensor], bool] | None = None) -> torch.Tensor:
        """Updates the parameters, forgets the gradients, and returns their norm before clipping, on the device.

        `allowed` is asked first, with the norm, whether to update at all.
        """
        self.settle()
        norm = self._step(allowed)
        self.optimizer.zero_grad()
        self.sharded.updated()
        return norm

    def _step(self, allowed: Callable[[torch.Tensor], bool] | None) -> torch.Tensor:
        if self.eager:
            assert allowed is None, "the config is checked before"
            self.optimizer.step()  # what got its gradient late, or none
            self._then(True)
            return self._eager_norm()
        self.scaler.unscale_(self.optimizer)
        if self.sharded.copies is not None and self.scaler.is_enabled():
            self.scaler.agree(self.optimizer)
        if self._offloaded is None:
            norm = self.sharded.clip(self.clip)
            if does := allowed is None or allowed(norm):
                self.scaler.step(self.optimizer)
        else:
            norm = self._offloaded.norm()
            scale = None if self.clip is None else torch.clamp(self.clip / (norm + 1e-6), max=1.0)
            if does := allowed is None or allowed(norm):
                self.scaler.step(self.optimizer, scale=scale)
        self._then(self.scaler.taken(self.optimizer) if does else False)
        self.scaler.update()
        return norm

    def _known(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """A gradient is complete, and its parameter is updated next: for the norm."""
        self.settle()
        self._squares.append(norm_of(local_of(gradient)).square())

    def _step_one(self, parameter: torch.Tensor) -> None:
        if not self.sharded.last or parameter.grad is None:
            return
        assert isinstance(parameter, nn.Parameter)
        self._known(parameter, parameter.grad)
        if isinstance(self.optimizer, (Elementwise, AdamMini)):
            self.optimizer.update(self._group_of[parameter], [parameter])
        else:
            self._step_alone(parameter)
        parameter.grad = None

    def _step_alone(self, parameter: nn.Parameter) -> None:
        """One of torch's optimizers, shown this parameter alone."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [p for p in params if p is parameter]
        self.optimizer.step()
        for group, params in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = params

    def _eager_norm(self) -> torch.Tensor:
        squares, self._squares = self._squares, []
        total = torch.stack([norm_of(torch.zeros(1, device=self.sharded.device)), *squares]).sum()
        shard = self.sharded.mesh["shard"]
        if shard.size() > 1:
            self.sharded.sum_up(total, shard.get_group())
        return total.sqrt().float()
