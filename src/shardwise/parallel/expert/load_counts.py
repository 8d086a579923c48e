"""How many tokens each expert got: counted on the device, read when asked, with or without expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.core.compat.torch_private import in_backward

if TYPE_CHECKING:
    from shardwise.parallel.routers.token_groups import Tokens


@dataclass(frozen=True)
class Balance:
    """The busiest expert of a layer over the mean of that layer: of the worst layer, and of all layers on average."""

    worst: float
    mean: float


@torch.library.custom_op("shardwise::count_choices", mutates_args={"counts"})
def _count_choices(counts: torch.Tensor, chosen: torch.Tensor, real: torch.Tensor) -> None:
    """Adds to `counts` how often `real` tokens chose each number; an operator, so that it breaks no compiled graph."""
    # A graph task is under way: this is a forward that backward asked for again.
    if not in_backward():
        asked = ((chosen < len(counts)) & real[:, None]).to(counts.dtype)
        counts.scatter_add_(0, chosen.clamp(max=len(counts) - 1).flatten(), asked.flatten())


@_count_choices.register_fake
def _(counts: torch.Tensor, chosen: torch.Tensor, real: torch.Tensor) -> None:
    return None


class ExpertLoads:
    """Counts the tokens that training sends to each expert; what is computed again in backward counts once.

    A rank counts the tokens that it was given, those of tensor parallelism whole. `tokens` tells padding, which counts
    nothing, from the others; without it all count.
    """

    def __init__(self, experts: Mapping[str, nn.Module], device: torch.device) -> None:
        self.layers = list(experts)
        modules: list[Any] = list(experts.values())
        self._sizes = [int(m.num_experts) for m in modules]
        shape = len(self._sizes), max(self._sizes, default=0)
        self.tokens: Tokens | None = None
        self._counts = torch.zeros(
            shape, dtype=torch.int64, device=device
        )  # layers × experts, of this step
        self._before = torch.zeros_like(self._counts)  # of steps before
        for row, module in enumerate(modules):
            module.register_forward_pre_hook(self._hook(row), with_kwargs=True)

    def read(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Tokens by layer and expert since the last reset; with a group (data × context), those of all its ranks.

        A layer with fewer experts than others has zeros at its end.
        """
        counts = self._counts + self._before
        if group is not None:
            dist.all_reduce(counts, group=group)
        return counts

    def reset(self) -> None:
        """Begins to count anew."""
        self._counts.zero_()
        self._before.zero_()

    def end_step(self) -> torch.Tensor:
        """Tokens by layer and expert of the step that ends, on this rank; the next is counted for itself."""
        counts = self._counts.clone()
        self._before += counts
        self._counts.zero_()
        return counts

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Around a forward whose tokens are nobody's."""
        before = self._counts.clone()
        try:
            yield
        finally:
            self._counts.copy_(before)

    def balance(self, counts: torch.Tensor) -> Balance | None:
        """A summary of what was read, for the metrics; None where nothing was counted."""
        rows = [row[:size].float() for row, size in zip(counts.cpu(), self._sizes, strict=True)]
        ratios = [float(row.max() / row.mean()) for row in rows if row.sum() > 0]
        return Balance(max(ratios), sum(ratios) / len(ratios)) if ratios else None

    def _hook(self, row: int) -> Any:
        counts = self._counts[row, : self._sizes[row]]

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (
                not module.training or not torch.is_grad_enabled()
            ):  # without gradients: an attempt, or a reference
                return
            chosen = [*args, *kwargs.values()][1].detach()
            if isinstance(chosen, DTensor):
                chosen = chosen.redistribute(chosen.device_mesh, [Replicate()]).to_local()
            chosen = chosen.reshape(-1, chosen.shape[-1])
            real = None if self.tokens is None else self.tokens.real
            _count_choices(
                counts,
                chosen,
                torch.ones_like(chosen[:, 0], dtype=torch.bool) if real is None else real,
            )

        return count
