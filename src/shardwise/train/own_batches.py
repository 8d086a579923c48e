"""The tensor, context, expert and pipeline axes in a user's own loop.

The user hands every rank of such a group the same batch, as to an unsharded model; here each rank
takes its part of it, and the loss is that of the full batch: the mean over its labels, the same on
every rank of the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.config.axes import check_axes, check_model_axes
from shardwise.config.combinations import axes_used
from shardwise.config.schema import Run
from shardwise.core.compat.hf_private import attention_of, is_config
from shardwise.core.compat.torch_private import tree_map
from shardwise.core.errors import UserError
from shardwise.core.labels import IGNORE
from shardwise.data.loader import MicroBatch
from shardwise.distributed.mesh import World
from shardwise.nn.models.build import FLAG, without_recording
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.tasks import class_names
from shardwise.nn.objective import Loss
from shardwise.objectives.causal import CausalObjective
from shardwise.parallel.parallel_context import ParallelContext
from shardwise.parallel.tensor.local import to_local
from shardwise.train.loop import seed_step
from shardwise.train.trial.check import check_axes as try_axes

# What a model is told about a batch; the switches of its output are left to us.
INPUTS = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")
SWITCHES = ("use_cache", "return_dict", "num_items_in_batch")


def source_of(model: nn.Module, run: Run, ranks: int) -> ModelSource:
    """What tiny models of the user's model are built by; raises UserError if it cannot be divided.

    Checks the axes against the ranks and the model's config.
    """
    axes = ", ".join(axes_used(run.parallel))
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if not is_config(config) or name not in class_names("causal"):
        problem = f"is a {name}, and only causal language models of transformers are divided so"
        remedy = f"pass a …ForCausalLM, or leave {axes} out"
        raise UserError("model", name, problem, remedy)
    attention = attention_of(config) or ""
    if attention not in ("", "sdpa", "eager"):
        problem = f"is the model's attention, which is not divided by {axes}"
        remedy = 'load the model with attn_implementation="sdpa"'
        raise UserError("attn_implementation", attention, problem, remedy)
    parallel = run.parallel
    divides_batches = max(parallel.tensor, parallel.context, parallel.pipeline) > 1
    if divides_batches and getattr(config.get_text_config(), FLAG, False):
        problem = "the model's own loss of its routers is that of whole batches on one rank"
        remedy = f"set model.config.{FLAG} = False, or use shardwise train, which has router losses"
        raise UserError(f"model.config.{FLAG}", True, problem, remedy)
    check_axes(run, ranks)
    check_model_axes(run, config, ranks)
    # Its own loss of routers is of each rank's batch, and no matter of the trial.
    config = without_recording(config)
    return ModelSource(name, config, None, "", task="causal", attention=attention)


def try_model(source: ModelSource, run: Run, world: World) -> None:
    """Tries the axes on a tiny model of the class, on the first rank; raises its UserError on all.

    The outcome is cached, as that of the trial of `shardwise train` is.
    """
    trouble: list[Any] = [None]
    if world.is_main:
        try:
            try_axes(source, run)
        except UserError as error:
            trouble = [(error.field, error.value, error.problem, error.remedy)]
    dist.broadcast_object_list(trouble, 0, group=world.control)
    if trouble[0] is not None:
        raise UserError(*trouble[0])


@dataclass(frozen=True)
class OwnBatch(MicroBatch):
    """A user's batch; the loss of each part is divided by the label tokens of all, `units`."""

    units: Any = 1


class OwnObjective:
    """The loss of a user's batch: this rank's share of the mean over its label tokens."""

    figures: tuple[str, ...] = ()
    of_tokens = True

    def __init__(self, model: nn.Module) -> None:
        self._causal = CausalObjective(model)

    def __call__(self, model: Any, batch: OwnBatch) -> Loss:
        """Sum of -log p over this rank's tokens, divided by the label tokens of the batch."""
        loss = self._causal(model, batch)
        return replace(loss, total=loss.total / batch.units)


class OwnCalls:
    """Calls a model that is divided along axes with the batches of a user's own loop."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self.model = model
        self.context = context
        self.objective = OwnObjective(model)
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._seed = self._common_seed()

    def _common_seed(self) -> int:
        """The first rank's seed: ranks with the same rows have to drop out the same."""
        world = self.context.world
        seed: list[Any] = [torch.initial_seed() % (1 << 20)]
        dist.broadcast_object_list(seed, 0, group=world.control)
        return int(seed[0])

    def __call__(self, args: tuple[Any, ...], given: Mapping[str, Any], number: int) -> Any:
        """The model's output for a batch, whose number decides what is dropped out."""
        named = dict(zip(self._names, args, strict=False)) | dict(given)
        context = self.context
        if context.tensor is None and context.context is None:
            return self.model(**named)  # experts exchange their tokens within the forward
        with self._random(number), context.active():
            if named.get("labels") is None and named.get("shift_labels") is None:
                return self._outputs(named)
            loss = context.loss(self.model, self.objective, self.batch(named)).total
            return _output(self._summed(loss))

    def learn(
        self,
        batches: list[dict[str, Any]],
        scale: Callable[[torch.Tensor], torch.Tensor],
        prepare: Callable[[bool, bool], None],
        number: int,
    ) -> list[Loss]:
        """Forward and backward of an update's batches through the pipeline."""
        taken = [self.batch(given) for given in batches]
        with self._random(number):
            return self.context.learn(
                self.model, self.objective, taken, lambda loss: scale(loss.total), prepare
            )

    def losses(self, batches: list[dict[str, Any]]) -> list[Loss]:
        """The losses of batches without backward, where this rank has them."""
        taken = [self.batch(given) for given in batches]
        return self.context.losses(self.model, self.objective, taken)

    def total(self, losses: list[Loss]) -> torch.Tensor:
        """This rank's share of the batches' losses, such that its mean over all ranks is theirs."""
        world = self.context.world
        total = torch.zeros((), device=world.device)
        for loss in losses:
            total += loss.total.detach().float()
        return total * self.context.counts * (world.size // world.layout.data)

    def _outputs(self, named: dict[str, Any]) -> Any:
        """The model's own output without labels, full on every rank."""
        if self.context.context is not None:
            problem = "each rank has a part of the tokens, so the loss is computed by the engine"
            raise UserError("labels", None, problem, "pass labels= to the engine")
        outputs = self.model(**{"use_cache": False} | named)
        return tree_map(_full, outputs)

    def _summed(self, loss: torch.Tensor) -> torch.Tensor:
        mesh = self.context.world.context
        if mesh is None:
            return loss
        summed: torch.Tensor = _SumOverParts.apply(loss, mesh.get_group())  # type: ignore[no-untyped-call]
        return summed

    def batch(self, given: Mapping[str, Any]) -> OwnBatch:
        """A user's batch, with its labels shifted, and counted before it is divided."""
        if not isinstance(given, Mapping):
            problem = f"is a {type(given).__name__}, not a dictionary of the model's arguments"
            raise UserError("batch", None, problem, 'use {"input_ids": …, "labels": …}')
        unknown = sorted(set(given) - {*INPUTS, *SWITCHES})
        if unknown:
            problem = "is not divided by tensor, context and pipeline parallelism"
            raise UserError(f"batch: {unknown[0]}", None, problem, f"pass {', '.join(INPUTS)} only")
        ids: Any = given.get("input_ids")
        labels: Any = given.get("shift_labels")
        if labels is None and given.get("labels") is not None:
            labels = F.pad(given["labels"][:, 1:], (0, 1), value=IGNORE)
        for name, value in (("input_ids", ids), ("labels", labels)):
            if value is None:
                raise UserError(f"batch: {name}", None, "is missing", "pass input_ids and labels")
        units: Any = given.get("num_items_in_batch")
        if units is None:
            units = (labels != IGNORE).sum().clamp(min=1)
        if isinstance(units, torch.Tensor):
            units = units.to(self.context.world.device)
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        return OwnBatch(ids, labels, positions, mask, units=units)

    @contextmanager
    def _random(self, number: int) -> Iterator[None]:
        """Random numbers that ranks along `tensor` have in common; the user's own are untouched."""
        if not self.model.training:
            yield
            return
        world = self.context.world
        devices = [world.device] if world.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            seed_step(self._seed, number, world.rank // world.layout.tensor)
            yield


class _SumOverParts(torch.autograd.Function):
    """The loss of a full batch from those of its parts.

    FSDP averages gradients over the ranks with parts, too, hence the factor of their number.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[override]
        ctx.parts = dist.get_world_size(group)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.parts, None


def _full(value: Any) -> Any:
    """A tensor with all its parts, whose gradient is the same on every rank."""
    if not isinstance(value, DTensor):
        return value
    return to_local(value.redistribute(placements=[Replicate()]), Replicate())


def _output(loss: torch.Tensor) -> Any:
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(loss=loss)  # type: ignore[arg-type]
