"""Loss scaling for fp16: torch's GradScaler with hysteresis and a least scale, or a constant scale.

The scale and its counters stay on the device, so that an update does not wait for it. The rule for a dynamic scale:
the `hysteresis`-th overflow halves the scale; `growth_interval` steps without one double it, and the first doubling
after an overflow takes one step more, as in DeepSpeed. The scale cannot shrink below the least scale: an overflow
there sets `exhausted`, which the loop reads when it reports.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.config.schema import LossScale
from shardwise.core.compat.torch_private import OpenGradScaler


class LossScaler(OpenGradScaler):
    """GradScaler (scale, unscale_, step, state_dict, …) whose `update` follows the run's `loss_scale`."""

    def __init__(self, device: str, settings: LossScale, enabled: bool) -> None:
        self.settings = settings
        start = settings.initial if settings.value == "dynamic" else settings.value
        super().__init__(device, init_scale=float(start), enabled=enabled)
        if enabled:  # torch starts with the first loss, but only the last stage of a pipeline has one
            self.start(torch.device(device))
        self._left: torch.Tensor | None = None  # overflows until the scale is halved
        self._exhausted: torch.Tensor | None = None

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Shares overflows with all ranks, which have different parts of parameters; call it after `unscale_`."""
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return
        for overflow in self.overflows_of(optimizer):
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)

    def taken(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | bool:
        """Whether `step` updated the parameters, as 0 or 1 on the device; True without scaling.

        Call it after `step` and before `update`.
        """
        if not self.is_enabled():
            return True
        overflows = torch.stack([overflow.reshape(()) for overflow in self.overflows_of(optimizer)])
        return (overflows.sum() == 0).float()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapts the scale, by whether this step overflowed on any rank; call it after `step`."""
        assert new_scale is None, "the scale follows loss_scale"
        if not self.is_enabled():
            return
        scale, tracker = self.scale_and_growth()
        overflows = self.take_overflows()
        assert overflows, "update needs unscale_ or step before it"
        if self.settings.value == "dynamic":
            flags = [overflow.to(scale.device, non_blocking=True).reshape(()) for overflow in overflows]
            self._adapt(torch.stack(flags).sum() > 0, scale, tracker)

    def _adapt(self, overflow: torch.Tensor, scale: torch.Tensor, tracker: torch.Tensor) -> None:
        rule = self.settings
        left = self._counter(scale.device)
        assert self._exhausted is not None
        shift = overflow & (left <= 1)
        self._exhausted.logical_or_(shift & (scale.reshape(()) <= rule.minimum))
        good = tracker.reshape(()) + 1  # steps without overflow, this one included
        grow = ~overflow & (good > 1) & ((good - 1) % rule.growth_interval == 0)
        refill = ~overflow if rule.consecutive_hysteresis else grow
        halved = (scale / 2).clamp(min=rule.minimum)
        scale.copy_(torch.where(shift, halved, torch.where(grow, scale * 2, scale)))
        left.copy_(torch.where(refill, torch.full_like(left, rule.hysteresis), left - (overflow & ~shift).int()))
        tracker.copy_(torch.where(overflow, torch.zeros_like(tracker), tracker + 1))

    def _counter(self, device: torch.device) -> torch.Tensor:
        if self._left is None:
            self._left = torch.tensor(self.settings.hysteresis, dtype=torch.int32, device=device)
        if self._exhausted is None:
            self._exhausted = torch.tensor(False, device=device)
        return self._left

    @property
    def exhausted(self) -> bool:
        """Whether a step overflowed at the least scale; waits for the device."""
        return self._exhausted is not None and bool(self._exhausted)

    def trouble(self) -> str | None:
        """Describes an overflow at the least scale, if there was one."""
        if not self.exhausted:
            return None
        return (
            f"gradients overflow fp16 even at the least loss scale ({self.settings.minimum:g})\n"
            "  → use precision: bf16 or fp32, lower train.learning_rate, or lower advanced.loss_scale.minimum"
        )

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters; empty if scaling is off."""
        if not self.is_enabled():
            return {}
        left = self.settings.hysteresis if self._left is None else int(self._left)
        return {"scale": self.get_scale(), "_growth_tracker": self.growth(), "hysteresis": left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes from a saved scale, unless the scale is constant now; hysteresis is capped at the config's."""
        if not self.is_enabled() or self.settings.value != "dynamic":
            return
        device = self.set_scale(float(state_dict["scale"]), int(state_dict["_growth_tracker"]))
        limit = self.settings.hysteresis
        left = min(int(state_dict.get("hysteresis", limit)), limit)
        self._left = torch.tensor(left, dtype=torch.int32, device=device)
