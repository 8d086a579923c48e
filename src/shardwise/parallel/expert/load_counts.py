"""Counts the tokens of each expert on the device, with or without expert parallelism."""

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
from shardwise.parallel.tensor.local_blocks import local_run_of

if TYPE_CHECKING:
    from shardwise.parallel.routers.token_groups import Tokens


@dataclass(frozen=True)
class Balance:
    """The load of a layer's busiest expert over the mean load: worst layer, and average."""

    worst: float
    mean: float


@torch.library.custom_op("shardwise::count_choices", mutates_args=())
def _count_choices(chosen: torch.Tensor, real: torch.Tensor, experts: int) -> torch.Tensor:
    """How often `real` tokens chose each expert; 0 in recomputation. An operator: no graph breaks.

    It adds to nothing itself: compiled operators that write to their arguments cannot be rehearsed.
    """
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    if in_backward():  # the forward of a recomputed block
        return counts
    counted = ((chosen < experts) & real[:, None]).to(counts.dtype)
    return counts.scatter_add_(0, chosen.clamp(max=experts - 1).flatten(), counted.flatten())


@_count_choices.register_fake
def _(chosen: torch.Tensor, real: torch.Tensor, experts: int) -> torch.Tensor:
    return chosen.new_empty(experts, dtype=torch.int64)


class ExpertLoads:
    """Counts the tokens that training routes to each expert; recomputation does not count again.

    A rank counts its own tokens; ranks along `tensor` all count the same ones. `tokens` identifies
    padding, which is not counted; without it, everything is.
    """

    def __init__(self, experts: Mapping[str, nn.Module], device: torch.device) -> None:
        self.layers = list(experts)
        modules: list[Any] = list(experts.values())
        self._sizes = [int(m.num_experts) for m in modules]
        self.tokens: Tokens | None = None
        shape = (len(self._sizes), max(self._sizes, default=0))  # layers × experts
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)  # of this step
        self._before = torch.zeros_like(self._counts)  # of earlier steps since the last reset
        for row, module in enumerate(modules):
            module.register_forward_pre_hook(self._hook(row), with_kwargs=True)

    def read(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Tokens by layer and expert since the last reset, summed over the ranks of `group`.

        Rows of layers with fewer experts than others end in zeros.
        """
        counts = self._counts + self._before
        if group is not None:
            dist.all_reduce(counts, group=group)
        return counts

    def reset(self) -> None:
        """Sets all counts to zero."""
        self._counts.zero_()
        self._before.zero_()

    def end_step(self) -> torch.Tensor:
        """Ends a step; returns its tokens by layer and expert, on this rank."""
        counts = self._counts.clone()
        self._before += counts
        self._counts.zero_()
        return counts

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Discards the counts of forwards inside of this context."""
        before = self._counts.clone()
        try:
            yield
        finally:
            self._counts.copy_(before)

    def balance(self, counts: torch.Tensor) -> Balance | None:
        """A summary of counts from `read`, for the metrics; None if nothing was counted."""
        rows = [row[:size].float() for row, size in zip(counts.cpu(), self._sizes, strict=True)]
        ratios = [float(row.max() / row.mean()) for row in rows if row.sum() > 0]
        if not ratios:
            return None
        return Balance(max(ratios), sum(ratios) / len(ratios))

    def _hook(self, row: int) -> Any:
        counts = self._counts[row, : self._sizes[row]]

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Without gradients, the forward is a trial or a reference.
            if not module.training or not torch.is_grad_enabled():
                return
            chosen = [*args, *kwargs.values()][1].detach()
            if isinstance(chosen, DTensor):
                chosen = chosen.redistribute(chosen.device_mesh, [Replicate()]).to_local()
            chosen = chosen.reshape(-1, chosen.shape[-1])
            real = None if self.tokens is None else self.tokens.real
            if real is None:
                real = torch.ones_like(chosen[:, 0], dtype=torch.bool)
            run = local_run_of(module)
            if run is None or not run.is_part(chosen):
                counts.add_(_count_choices(chosen, real, len(counts)))
            else:
                own = _count_choices(chosen, run.own_tokens(real), len(counts))
                counts.add_(run.ranks.add_up(own))

        return count
