"""DeepSpeed's five schedules as scheduler objects, on the pure functions of `shardwise.optim.schedules`.

They set the learning rate on construction and after each update; `last_batch_iteration` counts from -1, as DeepSpeed's.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.config.schema import Train
from shardwise.core.errors import UserError
from shardwise.optim.schedules import learning_rate, momentum


class _Schedule:
    """Sets the learning rate (and, if the schedule controls it, the first beta) of each parameter group."""

    def __init__(self, optimizer: Any, peak: Any, settings: dict[str, Any], last_batch_iteration: int) -> None:
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        groups = optimizer.param_groups
        peaks = [group["lr"] for group in groups] if peak is None else _per_group(peak, len(groups))
        kinds = [
            {"type": type(self).__name__} | {k: _per_group(v, len(groups))[index] for k, v in settings.items()}
            for index in range(len(groups))
        ]
        self._plans = [Train(learning_rate=p, schedule=kind) for p, kind in zip(peaks, kinds, strict=True)]  # type: ignore[arg-type]
        self._last_lr: list[float] = []
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        """Current learning rate of each group."""
        at = self.last_batch_iteration + 1
        return [learning_rate(plan, at, at + 1) for plan in self._plans]

    def get_last_lr(self) -> list[float]:
        """Learning rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Call after each update: sets the learning rate of the next one."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        self._last_lr = self.get_lr()
        for group, plan, rate in zip(self.optimizer.param_groups, self._plans, self._last_lr, strict=True):
            group["lr"] = rate
            first = momentum(plan, self.last_batch_iteration + 1)
            if first is not None and "betas" in group:
                group["betas"] = (first, 0.99)  # the second is DeepSpeed's own choice


class WarmupLR(_Schedule):
    """Warmup, then constant."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        settings = dict(warmup_min_lr=warmup_min_lr, warmup_num_steps=warmup_num_steps, warmup_type=warmup_type)
        super().__init__(optimizer, warmup_max_lr, settings, last_batch_iteration)


class WarmupDecayLR(_Schedule):
    """Warmup, then linear decay."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        settings = dict(total_num_steps=total_num_steps, warmup_min_lr=warmup_min_lr,
                        warmup_num_steps=warmup_num_steps, warmup_type=warmup_type)  # fmt: skip
        super().__init__(optimizer, warmup_max_lr, settings, last_batch_iteration)


class WarmupCosineLR(_Schedule):
    """Warmup to the optimizer's rate, then cosine decay."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        settings = dict(total_num_steps=total_num_steps, warmup_min_ratio=warmup_min_ratio,
                        warmup_num_steps=warmup_num_steps, cos_min_ratio=cos_min_ratio,
                        warmup_type=warmup_type)  # fmt: skip
        super().__init__(optimizer, None, settings, last_batch_iteration)


class OneCycle(_Schedule):
    """Up to a peak and back, then decay; the momentum moves inversely."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Any,
        cycle_max_lr: Any,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        names = ("optimizer", "cycle_max_lr", "last_batch_iteration", "self", "__class__", "names")
        settings = {k: v for k, v in locals().items() if k not in names}
        super().__init__(optimizer, cycle_max_lr, settings, last_batch_iteration)


class LRRangeTest(_Schedule):
    """Increases without end, to find the stability limit."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        settings = dict(lr_range_test_step_size=lr_range_test_step_size,
                        lr_range_test_step_rate=lr_range_test_step_rate,
                        lr_range_test_staircase=lr_range_test_staircase)  # fmt: skip
        super().__init__(optimizer, lr_range_test_min_lr, settings, last_batch_iteration)


KINDS: dict[str, type[_Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def configured(config: dict[str, Any], optimizer: torch.optim.Optimizer) -> _Schedule | None:
    """The schedule of the config's `scheduler` block; None if there is none."""
    block = config.get("scheduler")
    if not block or block.get("type") is None:
        return None
    name = block["type"]
    settings = block.get("params") or {}
    if name not in KINDS:
        remedy = f"use {', '.join(KINDS)}, or pass a scheduler of your own to initialize"
        raise UserError("scheduler.type", name, "is not known", remedy)
    try:
        built: Any = KINDS[name]
        return built(optimizer, **settings)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise UserError("scheduler.params", settings, f"do not fit {name} ({error})", "see its parameters") from None


def _per_group(value: Any, groups: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != groups:
            raise ValueError(f"{len(value)} values are given for {groups} groups of parameters")
        return list(value)
    return [value] * groups
