"""ZeRO stages 0–3 and hybrid sharding as policies on FSDP2, with its footguns kept in here.

[Note: stages on FSDP2] One mechanism serves every stage: `fully_shard` on a (replicate, shard) mesh.
  stage 0  mesh (N, 1): nothing sharded; gradients all-reduced once a step          moves 2Ψ a step
  stage 1  parameters gathered once a step, gradients kept whole until the last
           micro-batch, then reduce-scattered: only the optimizer is sharded        moves 2Ψ a step
  stage 2  gradients reduce-scattered every micro-batch                             moves (1+n)Ψ for n micro-batches
  stage 3  parameters freed after each block's forward and gathered again           moves 3nΨ
  hybrid   the same within a shard group; gradients all-reduced across groups on the last micro-batch
What bites, and what is done about it:
  * `set_reshard_after_backward(False)` left on the last micro-batch freezes training in silence, because the optimizer
    then updates shards that are never gathered again. `prepare_micro_batch(last=True)` always turns it back on.
  * After a forward without backward (evaluation) at stage 1 or 2 the parameters stay gathered and
    `model.parameters()` yields tensors that the optimizer does not own. We keep our own list, taken at sharding time,
    and `evaluation()` reshards on the way out; on the way in too: what was gathered to train may be rounded to fp8.
  * A collective that keeps a copy of the parameters within a step (hpZ) would train on old ones in silence. Whoever
    writes to the parameters calls `updated()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.core.compat.torch_private import TORCH, leave_integers_alone
from shardwise.core.dtypes import COMPUTE
from shardwise.core.effective_device import effective_device
from shardwise.nn.kernels.multi_tensor_norm import norm_of_all
from shardwise.nn.models.build import evaluating
from shardwise.observe.breakdown import OFF, Timer
from shardwise.optim.norms import norm_of
from shardwise.optim.shards import local_of
from shardwise.parallel.zero.units import choose_units

if TYPE_CHECKING:
    from shardwise.distributed.mesh import World
    from shardwise.parallel.expert.apply import ExpertParallel


class ShardedModel:
    """A model that is spread over the mesh and has its weights; the loop talks to FSDP only through this."""

    def __init__(self, model: nn.Module, stage: int, mesh: DeviceMesh) -> None:
        self.model, self.stage, self.mesh = model, stage, mesh
        self.parameters: dict[str, nn.Parameter] = {
            n: p for n, p in model.named_parameters() if p.requires_grad
        }
        self.units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.kept: frozenset[str] | None = None  # tensors that a checkpoint must hold; None = all
        self.lookup = 0  # parameters that a token only looks up, for the count of its arithmetic
        self.idle: Callable[[], list[str]] = (
            list  # what was asked for in vain, to be told at the end
        )
        self.last = True  # whether the optimizer steps after the micro-batch under way
        self.on_update: list[Callable[[], None]] = []
        self.on_save: list[Callable[[], None]] = []
        self.timer: Timer = OFF  # hears of it where ranks wait for each other
        self.copies: dict[str, int] | None = (
            None  # ranks that hold the same part; None = those along `replicate`
        )

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @property
    def data_parallel_size(self) -> int:
        return self.mesh.size()

    def prepare_micro_batch(self, last: bool) -> None:
        """Before the forward of each micro-batch; `last` is the one before the optimizer step."""
        root, self.last = self._root, last
        if self.stage <= 1:
            root.set_requires_gradient_sync(last)
        else:
            root.set_requires_all_reduce(last)
        if self.stage < 3:
            root.set_reshard_after_backward(last)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around forwards without backward: evaluation mode, no gradients, and shards put back at the end."""
        with evaluating(self.model):
            self.reshard()  # so that it never measures anything but the present parameters, as they are
            try:
                yield
            finally:
                self.reshard()

    def reshard(self) -> None:
        """Frees every gathered parameter, so that the module holds the optimizer's own tensors again."""
        for unit in self.units:
            unit.reshard()
        self.updated()

    def updated(self) -> None:
        """After anything wrote to the parameters (the optimizer's step, a checkpoint): forgets copies of them."""
        for forget in self.on_update:
            forget()

    def saved(self) -> None:
        """After a checkpoint: forgets what is no part of it, so that going on and resuming are the same."""
        for forget in self.on_save:
            forget()

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """The global gradient norm, on the device; gradients are scaled down to max_norm if they exceed it."""
        if self.copies is not None:
            return self._clip_everywhere(max_norm)
        parameters = list(self.parameters.values())
        norm = self.norm([p.grad for p in parameters if p.grad is not None])
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _clip_everywhere(self, max_norm: float | None) -> torch.Tensor:
        """As `clip`, where parameters are divided along several axes: each part counts once, wherever it lies."""
        assert self.copies is not None
        found = {n: local_of(p.grad) for n, p in self.parameters.items() if p.grad is not None}
        square = torch.zeros(
            (),
            dtype=torch.float64 if effective_device(self.device) == "cpu" else torch.float32,
            device=self.device,
        )
        for name, gradient in found.items():
            square += norm_of(gradient).square() / self.copies[name]
        self.sum_up(square)
        norm = square.sqrt().float()
        if max_norm is not None:
            scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
            for gradient in found.values():
                gradient.mul_(scale.to(gradient.dtype))
        return norm

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The norm of sharded gradients taken together, the same on every rank.

        torch's own for DTensors adds up over the ranks too, out of the timer's sight, and in bf16 where they are.
        """
        local = [local_of(gradient) for gradient in gradients]
        if not local:
            norm = torch.zeros((), device=self.device)
        elif effective_device(self.device) == "cpu":
            norm = torch.linalg.vector_norm(torch.stack([norm_of(gradient) for gradient in local]))
        else:
            norm = norm_of_all(local)
        if self.mesh["shard"].size() > 1:
            square = norm.square()
            self.sum_up(square, self.mesh["shard"].get_group())
            norm = square.sqrt()
        return norm.float()

    def sum_up(self, figures: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Adds a few figures up over the ranks: whoever was late before it is waited for here."""
        with self.timer.meeting(dist.get_world_size(group)):
            dist.all_reduce(figures, group=group)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model


def shard_model(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    stage: int,
    precision: str,
    bucket: int | None = None,
    whole: bool = False,
    together: int = 1,
    reduce: str = "fp32",
) -> None:
    """Divides each block (or what fits a bucket), then the rest, over the mesh; on `meta` it takes no memory.

    `whole`: there is one rank, and what it trains is what it computes with. `together`: blocks of a unit where no
    bucket is given. `reduce`: what gradients are added up in.
    """
    if TORCH < (2, 12):
        leave_integers_alone()
    plain = set(model.parameters()) if whole else unmanaged(model, stage, precision)
    options = _options(mesh, stage, precision, reduce)
    for unit in choose_units(model, blocks, bucket, mesh.size(1), plain, together):
        modules: Any = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
        fully_shard(modules, ignored_params=plain, **options)


def shard_experts(
    experts: ExpertParallel, world: World, stage: int, precision: str, reduce: str = "fp32"
) -> None:
    """Divides experts that are spread over ranks among those that have the same ones; before `shard_model`."""
    mesh = world.expert_shards
    assert mesh is not None
    options = _options(mesh, stage, precision, reduce)
    for module in experts.modules:
        fully_shard(module, shard_placement_fn=experts.placement(mesh), **options)
    experts.average_over(world.mesh.size(), mesh)


def _options(mesh: DeviceMesh, stage: int, precision: str, reduce: str) -> dict[str, Any]:
    compute, sums = COMPUTE[precision], COMPUTE[reduce] if mesh.size() > 1 else torch.float32
    fp32 = torch.float32
    policy = MixedPrecisionPolicy(
        None if compute is fp32 else compute, None if compute is sums is fp32 else sums
    )
    # With one replica the plain axis does: on two axes FSDP would call an all-reduce in a group of one.
    fsdp_mesh = mesh["shard"] if mesh.size(0) == 1 else mesh
    return {"mesh": fsdp_mesh, "reshard_after_forward": stage == 3, "mp_policy": policy}


def unmanaged(model: nn.Module, stage: int, precision: str) -> set[nn.Parameter]:
    """Frozen parameters that every rank has whole at this stage and in the type they are used in: nothing to gather."""
    compute = COMPUTE[precision]
    return {
        p for p in model.parameters()
        if stage < 3 and not p.requires_grad and (p.dtype == compute or not p.is_floating_point())
    }  # fmt: skip
