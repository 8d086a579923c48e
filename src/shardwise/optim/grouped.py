"""Base class of optimizers that update the parameters of a group together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def evaluated(closure: Callable[[], float] | None) -> float | None:
    """Returns the loss that a closure computes, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Grouped(torch.optim.Optimizer):
    """Optimizer that steps group by group through `update`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step on every parameter that has a gradient."""
        loss = evaluated(closure)
        for group in self.param_groups:
            self.update(group, [p for p in group["params"] if p.grad is not None])
        return loss

    @abstractmethod
    def update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Takes one step on some parameters of a group."""
