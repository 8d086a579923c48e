"""ZeRO stages 0–3 and hybrid sharding as policies on FSDP2, with its pitfalls handled here.

[Note: stages on FSDP2] One mechanism serves every stage: `fully_shard` on a (replicate, shard)
mesh. Per step of n micro-batches:
  stage 0  mesh (N, 1): nothing sharded; gradients all-reduced once          moves 2Ψ
  stage 1  parameters gathered once, gradients unsharded until the last
           micro-batch, then reduce-scattered: only the optimizer is sharded moves 2Ψ
  stage 2  gradients reduce-scattered every micro-batch                      moves (1+n)Ψ
  stage 3  parameters freed after each block's forward and gathered again    moves 3nΨ
  hybrid   the same within a shard group; gradients all-reduced across groups on the last
           micro-batch
The pitfalls, and how they are avoided:
  * `set_reshard_after_backward(False)` left on the last micro-batch freezes training silently,
    because the optimizer then updates shards that are never gathered again.
    `prepare_micro_batch(last=True)` always turns it back on.
  * After a forward without backward (evaluation) at stage 1 or 2 the parameters stay gathered and
    `model.parameters()` yields tensors that the optimizer does not own. We store our own list,
    taken at sharding time, and `evaluation()` reshards on exit; on entry too: what was gathered to
    train may be rounded to fp8.
  * A collective that caches a copy of the parameters within a step (hpZ) would train on stale ones
    silently. Whoever writes to the parameters calls `updated()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from shardwise.parallel.zero.units import choose_units, list_of

if TYPE_CHECKING:
    from shardwise.distributed.mesh import World
    from shardwise.parallel.expert.apply import ExpertParallel


class ShardedModel:
    """A model sharded over the mesh, with weights; the training loop's interface to FSDP."""

    def __init__(self, model: nn.Module, stage: int, mesh: DeviceMesh) -> None:
        self.model = model
        self.stage = stage
        self.mesh = mesh
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.parameters[name] = parameter
        self.units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.kept: frozenset[str] | None = None  # tensors that a checkpoint must hold; None = all
        self.embedding_only_numel = 0  # parameters that a token only looks up, excluded from FLOPs
        # Notes for the end of the run about settings without effect.
        self.ineffective_notes: Callable[[], list[str]] = list
        # Whether gradients that are reduced now are complete, apart from those of `complete_late`.
        self.last = True
        self.on_update: list[Callable[[], None]] = []
        self.on_save: list[Callable[[], None]] = []
        self.timer: Timer = OFF  # measures where ranks wait for each other
        # By parameter, the ranks that hold the same part; None = those along `replicate`.
        self.replication_factors: dict[nn.Parameter, int] | None = None
        # Parameters of several pipeline chunks: gradients are incomplete until all have run.
        self.complete_late: frozenset[nn.Parameter] = frozenset()
        self.gradient_of: Callable[[nn.Parameter], torch.Tensor] = own_gradient

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        return next(iter(self.parameters.values())).device

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different data: replicas times shards."""
        return self.mesh.size()

    def prepare_micro_batch(self, last: bool, final: bool = True) -> None:
        """Sets up each micro-batch's forward; `last` is the one before the optimizer step.

        A pipeline rank calls it before backwards: `last` is a chunk's last, `final` that of all.
        """
        root = self._root
        if self.stage <= 1:
            # FSDP would reduce what other chunks have accumulated so far too.
            last = last and final
            root.set_requires_gradient_sync(last)
        else:
            root.set_requires_all_reduce(last)
        self.last = last
        if self.stage < 3:
            root.set_reshard_after_backward(last)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluation mode without gradients; parameters are sharded again on exit."""
        with evaluating(self.model):
            self.reshard()  # so that only the current parameters are evaluated, unrounded
            try:
                yield
            finally:
                self.reshard()

    def reshard(self) -> None:
        """Frees every gathered parameter: the module then holds the optimizer's own tensors."""
        for unit in self.units:
            unit.reshard()
        self.updated()

    def updated(self) -> None:
        """Drops copies of the parameters, after anything (optimizer, checkpoint) changed them."""
        for forget in self.on_update:
            forget()

    def saved(self) -> None:
        """Drops state that a checkpoint lacks, so that continued and resumed runs are the same."""
        for forget in self.on_save:
            forget()

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Returns the global gradient norm, on the device; clips gradients to `max_norm`."""
        gradients: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                gradients[parameter] = parameter.grad
        norm = self.norm_by_parameter(gradients)
        if max_norm is None:
            return norm
        if self.replication_factors is None:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), max_norm, norm)
            return norm
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients.values():
            local_of(gradient).mul_(scale.to(gradient.dtype))
        return norm

    def norm_by_parameter(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """As `norm`; of parameters sharded along several axes each part counts once."""
        if self.replication_factors is None:
            return self.norm(list(gradients.values()))
        squares = {p: norm_of(local_of(g)).square() for p, g in gradients.items()}
        return self.norm_of_squares(squares)

    def norm_of_squares(self, squares: Mapping[nn.Parameter, torch.Tensor]) -> torch.Tensor:
        """The global norm, by the squared norms of this rank's parts of the gradients."""
        factors = self.replication_factors
        dtype = torch.float64 if effective_device(self.device) == "cpu" else torch.float32
        total = torch.zeros((), dtype=dtype, device=self.device)
        for parameter, square in squares.items():
            total += square if factors is None else square / factors[parameter]
        shard = self.mesh["shard"]
        if factors is not None:
            self.sum_up(total)
        elif shard.size() > 1:
            self.sum_up(total, shard.get_group())
        return total.sqrt().float()

    def norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """The global norm of sharded gradients, the same on every rank.

        torch's own for DTensors sums over the ranks too, but untimed, and in bf16 for bf16 ones.
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
        """Sums a few figures over the ranks; the timer measures the wait for late ranks."""
        with self.timer.meeting(dist.get_world_size(group)):
            dist.all_reduce(figures, group=group)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model


def own_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient, zeros if it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@dataclass(frozen=True)
class ShardOptions:
    """How blocks are grouped into units, and what their gradients are summed in.

    Without a `bucket` (bytes of the largest buffer), `together` blocks make a unit. `unsharded`:
    the only rank trains the weights that it computes with. Modules that are `whole` are not split,
    and blocks are joined if `group_of` gives their names the same answer.
    """

    bucket: int | None = None
    together: int = 1
    unsharded: bool = False
    reduce: str = "fp32"
    whole: frozenset[nn.Module] = frozenset()
    group_of: Callable[[str], Any] = list_of


def shard_model(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    stage: int,
    precision: str,
    options: ShardOptions | None = None,
) -> None:
    """Shards each block (or what fits a bucket), then the rest; on `meta` it takes no memory."""
    options = options or ShardOptions()
    if TORCH < (2, 12):
        leave_integers_alone()
    plain = set(model.parameters()) if options.unsharded else unmanaged(model, stage, precision)
    settings = _fsdp_settings(mesh, stage, precision, options.reduce)
    shards = mesh.size(1)
    taken = set(plain)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            taken.update(module.parameters())
    for unit in choose_units(
        model,
        blocks,
        options.bucket,
        shards,
        taken,
        options.together,
        options.whole,
        options.group_of,
    ):
        modules: Any = list(unit.modules) if len(unit.modules) > 1 else unit.modules[0]
        fully_shard(modules, ignored_params=plain, **settings)


def shard_experts(
    experts: ExpertParallel, world: World, stage: int, precision: str, reduce: str = "fp32"
) -> None:
    """Shards experts over the ranks that hold the same ones; call before `shard_model`."""
    mesh = world.expert_shards
    assert mesh is not None
    settings = _fsdp_settings(mesh, stage, precision, reduce)
    for module in experts.modules:
        fully_shard(module, shard_placement_fn=experts.placement(mesh), **settings)
    experts.average_over(world.mesh.size(), mesh)


def _fsdp_settings(mesh: DeviceMesh, stage: int, precision: str, reduce: str) -> dict[str, Any]:
    compute = COMPUTE[precision]
    sums = COMPUTE[reduce] if mesh.size() > 1 else torch.float32
    param_dtype = None if compute is torch.float32 else compute
    reduce_dtype = None if compute is sums is torch.float32 else sums
    # With one replica the shard axis is enough: with two axes FSDP would all-reduce over one rank.
    fsdp_mesh = mesh["shard"] if mesh.size(0) == 1 else mesh
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    return {"mesh": fsdp_mesh, "reshard_after_forward": stage == 3, "mp_policy": policy}


def unmanaged(model: nn.Module, stage: int, precision: str) -> set[nn.Parameter]:
    """Frozen parameters with nothing to gather: unsharded at this stage, in the compute type."""
    if stage == 3:
        return set()
    compute = COMPUTE[precision]
    parameters = set()
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        if parameter.dtype == compute or not parameter.is_floating_point():
            parameters.add(parameter)
    return parameters
