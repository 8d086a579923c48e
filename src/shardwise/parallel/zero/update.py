"""One update of the parameters: unscale, norm, clip, step; or, eagerly, each after its gradient.

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


class OptimizerStep:
    """Steps an optimizer over a sharded model's parameters.

    `eager` is the share of the parameters updated during backward, their gradients freed at once;
    the norm is known only afterwards, so there is no clipping and no loss scale. For an optimizer
    that is not offloaded any share above 0 means all.
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
        """`settle` is called before anything changes: a checkpoint may still be copied to the host.

        `then` is called after each step with whether it changed the parameters (0 or 1 on the
        device, or a bool).
        """
        assert not eager or (clip is None and not scaler.is_enabled()), (
            "the config is checked before"
        )
        self.sharded = sharded
        self.optimizer = optimizer
        self.scaler = scaler
        self.clip = clip
        self.eager = eager
        self.settle = settle
        self._then = then
        self._offloaded = optimizer if isinstance(optimizer, OffloadedOptimizer) else None
        self._squares: dict[nn.Parameter, torch.Tensor] = {}
        if self._offloaded is not None:
            on_complete = self._record_norm if eager else None
            self._offloaded.attach(sharded, on_complete, accumulates, eager)
        elif eager:
            self._group_of: dict[nn.Parameter, dict[str, Any]] = {}
            for group in optimizer.param_groups:
                self._group_of |= dict.fromkeys(group["params"], group)
            for parameter in sharded.parameters.values():
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    @property
    def consumes(self) -> bool:
        """Whether gradients may be freed before the update is called."""
        return self._offloaded is not None or bool(self.eager)

    def __call__(self, allowed: Callable[[torch.Tensor], bool] | None = None) -> torch.Tensor:
        """Updates the parameters, frees the gradients, and returns their norm before clipping.

        The norm stays on the device. `allowed` decides by it whether to update at all.
        """
        self.settle()
        norm = self._step(allowed)
        self.optimizer.zero_grad()
        self.sharded.updated()
        return norm

    def _step(self, allowed: Callable[[torch.Tensor], bool] | None) -> torch.Tensor:
        if self.eager:
            assert allowed is None, "the config is checked before"
            for parameter in self.sharded.parameters.values():  # those with a late gradient
                if self._offloaded is None and parameter.grad is not None:
                    self._record_norm(parameter, parameter.grad)
            self.optimizer.step()
            self._then(True)
            return self._eager_norm()
        self.scaler.unscale_(self.optimizer)
        if self.scaler.is_enabled():
            self.scaler.agree(self.optimizer)
        options: dict[str, torch.Tensor | None] = {}
        if self._offloaded is None:
            norm = self.sharded.clip(self.clip)
        else:
            norm = self._offloaded.norm()
            scale = None if self.clip is None else torch.clamp(self.clip / (norm + 1e-6), max=1.0)
            options["scale"] = scale
        if allowed is None or allowed(norm):
            self.scaler.step(self.optimizer, **options)
            self._then(self.scaler.taken(self.optimizer))
        else:
            self._then(False)
        self.scaler.update()
        return norm

    def _record_norm(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds a complete gradient to the norm; its parameter is updated next."""
        self.settle()
        self._squares[parameter] = norm_of(local_of(gradient)).square()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        late = parameter in self.sharded.complete_late
        if late or not self.sharded.last or parameter.grad is None:
            return
        self._record_norm(parameter, parameter.grad)
        if isinstance(self.optimizer, (Elementwise, AdamMini)):
            self.optimizer.update(self._group_of[parameter], [parameter])
        else:
            self._step_alone(parameter)
        parameter.grad = None

    def _step_alone(self, parameter: nn.Parameter) -> None:
        """Steps one of torch's optimizers with only this parameter in its groups."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        for group, params in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [p for p in params if p is parameter]
        self.optimizer.step()
        for group, params in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = params

    def _eager_norm(self) -> torch.Tensor:
        norm = self.sharded.norm_of_squares(self._squares)
        self._squares = {}
        return norm
