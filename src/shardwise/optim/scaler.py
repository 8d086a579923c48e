"""Loss scaling for fp16: torch's GradScaler with hysteresis, a least scale, or a scale that stays.

The scale and its counters stay on the device, so that an update waits for nothing. The rule, for a dynamic scale:
an overflow halves the scale, but only the `hysteresis`-th of them; `growth_interval` steps without one double it, and
the first doubling after an overflow takes one step more (DeepSpeed counts so). An overflow at the least scale cannot be
mended: it is noted in `exhausted`, which the loop reads when it reports.
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
        if enabled:  # not with the first loss, as torch does: of a pipeline's stages only the last has one
            self.start(torch.device(device))
        self._left: torch.Tensor | None = None  # overflows until the scale is halved
        self._exhausted: torch.Tensor | None = None

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """After `unscale_`: an overflow on any rank is one on all, also where ranks have different parameters."""
        for overflow in self.overflows_of(optimizer):
            dist.all_reduce(overflow, op=dist.ReduceOp.MAX)

    def taken(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | bool:
        """After `step`, before `update`: whether it changed anything, as 0 or 1 on the device; True without scaling."""
        if not self.is_enabled():
            return True
        return (torch.stack([inf.reshape(()) for inf in self.overflows_of(optimizer)]).sum() == 0).float()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """After `step`: adapts the scale to whether this step overflowed on any rank."""
        assert new_scale is None, "the scale follows loss_scale"
        if not self.is_enabled():
            return
        scale, tracker = self.scale_and_growth()
        found = self.take_overflows()
        assert found, "update needs unscale_ or step before it"
        if self.settings.value == "dynamic":
            overflow = torch.stack([inf.to(scale.device, non_blocking=True).reshape(()) for inf in found]).sum() > 0
            self._adapt(overflow, scale, tracker)

    def _adapt(self, overflow: torch.Tensor, scale: torch.Tensor, tracker: torch.Tensor) -> None:
        rule, left = self.settings, self._counter(scale.device)
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
        """What to tell of a scale that can go no lower, if so."""
        if not self.exhausted:
            return None
        return (
            f"gradients overflow fp16 even at the least loss scale ({self.settings.minimum:g})\n"
            "  → use precision: bf16 or fp32, lower train.learning_rate, or lower advanced.loss_scale.minimum"
        )

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters; empty where scaling is off."""
        if not self.is_enabled():
            return {}
        left = self.settings.hysteresis if self._left is None else int(self._left)
        return {"scale": self.get_scale(), "_growth_tracker": self.growth(), "hysteresis": left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a saved scale, unless the run now says that it stays or how many overflows it takes."""
        if not self.is_enabled() or self.settings.value != "dynamic":
            return
        device = self.set_scale(float(state_dict["scale"]), int(state_dict["_growth_tracker"]))
        left = min(int(state_dict.get("hysteresis", self.settings.hysteresis)), self.settings.hysteresis)
        self._left = torch.tensor(left, dtype=torch.int32, device=device)
