"""For your own training loop: `initialize` shards a model and its optimizer, and returns an engine.

    engine = shardwise.initialize(model, config={"parallel": {"zero": 3}, "precision": "bf16"})
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

Every call of `backward` is one micro-batch; every `gradient_accumulation_steps`-th call of `step`
updates the parameters. The engine uses the same sharding, clipping, loss scaling and checkpoints as
`shardwise train`.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field, ValidationError
from torch import nn

from shardwise.checkpoint.store import (
    CheckpointStore,
    check_whole,
    choose_checkpoint,
    load_tensors,
    read_trainer,
)
from shardwise.config.axes import shard_size
from shardwise.config.combinations import first_clash
from shardwise.config.explain import wanted
from shardwise.config.renamed import RENAMED, rename
from shardwise.config.resolve import check_secondary
from shardwise.config.schema import Data, LossScale, Model, Offload, Parallel, Run, Source
from shardwise.config.section import Section
from shardwise.config.units import Duration, Number, Whole
from shardwise.core.errors import UserError
from shardwise.distributed.mesh import World, join_world, layout_of
from shardwise.nn.models.build import materialise
from shardwise.nn.models.source import ModelSource
from shardwise.nn.models.weights import fill_local
from shardwise.observe.breakdown import timer_for
from shardwise.optim.build import decay_groups
from shardwise.optim.scaler import LossScaler
from shardwise.parallel.offload.checkpoint_entries import masters
from shardwise.parallel.offload.disk import DiskFolder
from shardwise.parallel.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.offload.policy import (
    offload_given,
    offloaded_share,
    splits_masters,
    store_in_bf16,
)
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.zero.timed_collectives import watch_collectives
from shardwise.parallel.zero.update import OptimizerStep
from shardwise.train.own_batches import OwnCalls, source_of, try_model
from shardwise.train.state import prime_optimizer, tensors_of

Fill = Callable[[nn.Module], None]
RENAMED_HERE = RENAMED | {"accumulate": "gradient_accumulation_steps", "clip": "max_grad_norm"}


class EngineConfig(Section):
    """Settings of `initialize`: parallelism, precision, accumulation, clipping and offload."""

    parallel: Parallel = Parallel()
    precision: Literal["bf16", "fp16", "fp32"] = "fp32"
    loss_scale: LossScale = Field(
        LossScale(), description="loss scaling; for precision: fp16 alone"
    )
    gradient_accumulation_steps: Whole = Field(1, ge=1, description="micro-batches per update")
    max_grad_norm: Annotated[Number, Field(gt=0)] | None = 1.0
    learning_rate: Number = Field(
        2e-5, gt=0, description="for the default AdamW; ignored with an optimizer of your own"
    )
    weight_decay: Number = Field(
        0.01, ge=0, description="for the default AdamW; ignored with an optimizer of your own"
    )
    timeout: Duration = Field(600.0, gt=0, description="longest wait for another rank")
    offload: Offload = Field(
        Offload(), description="what is kept off the device; AdamW alone can be"
    )
    breakdown: bool = Field(
        False, description="measure where the time goes and what moves; see engine.breakdown()"
    )

    def as_run(self) -> Run:
        """These settings as a run's, for `parallelize`; model and data are placeholders."""
        return Run(
            model=Model(name="given"),
            data=Data(train=(Source(path="given"),)),
            parallel=self.parallel,
            precision=self.precision,
            offload=self.offload,
            timeout=self.timeout,
        )


class Engine:
    """A sharded model that is called like the model, and steps like an optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        config: EngineConfig,
        world: World,
        fill: Fill | None = None,
        like: ModelSource | None = None,
    ) -> None:
        self.config = config
        self.world = world
        before = dict(model.named_parameters(remove_duplicate=False))
        values: dict[str, torch.Tensor] = {}
        if fill is None:
            model.to(world.device)
            _copy_from_first(model)
            if splits_masters(config.offload, config.precision):
                values = {name: p.detach() for name, p in before.items()}
                store_in_bf16(model)
        self.timer = timer_for(world.device, config.breakdown, config.breakdown)

        def give_values(model: nn.Module, device: torch.device) -> None:
            if fill is not None:
                materialise(model, device)
                fill(model)

        self.sharded, self.context = parallelize(
            model, config.as_run(), world, timer=self.timer, materialise=give_values, like=like
        )
        self.module = model
        self._calls = None if like is None else OwnCalls(model, self.context)
        self.optimizer = _rebuilt(optimizer, before, self.sharded.parameters, config)
        if config.offload.optimizer != "none":
            self.optimizer = self._offloaded(self.optimizer, values)
            values = {}
        self.scaler = LossScaler(
            world.device.type, config.loss_scale, enabled=config.precision == "fp16"
        )
        # Gradients are accumulated in fp32, since users may accumulate more micro-batches than
        # configured (set_gradient_accumulation_boundary).
        eager = offloaded_share(config.offload, config.precision, config.max_grad_norm)
        self._update = OptimizerStep(
            self.sharded, self.optimizer, self.scaler, config.max_grad_norm, eager
        )
        self.updates = 0
        self._micro = 0  # index of the micro-batch within the update
        self._has_gradient = False  # whether `backward` was called since the last `step`
        self._last_breakdown = 0  # number of updates at the last call of `breakdown`
        self.accumulate = config.gradient_accumulation_steps
        self.boundary: bool | None = None  # whether `step` updates, if the user sets it
        self.grad_norm: torch.Tensor | None = None
        watch_collectives(model, self.timer)

    def _offloaded(
        self, built: torch.optim.Optimizer, values: dict[str, torch.Tensor]
    ) -> OffloadedOptimizer:
        """The same optimizer with its states (at stage 3, parameters too) placed by the config."""
        config = self.config
        world = self.world
        disk = None
        if "disk" in (config.offload.optimizer, config.offload.parameters):
            disk = DiskFolder(
                Path(config.offload.disk or "offload").expanduser().absolute(),
                world.rank,
                world.size,
            )
        result = offload_given(
            built, config.offload, self.sharded, world.device, disk, bool(values)
        )
        if values:
            for name, rows in masters(result).items():
                fill_local(self.sharded.parameters[name], values[name], rows)
        return result

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data this rank reads: ranks with the same one get the same batches."""
        return self.world.place.data

    @property
    def data_parallel_world_size(self) -> int:
        """Number of parts that the data is divided into."""
        return self.world.layout.data

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the next `step` will update the parameters."""
        if self.boundary is not None:
            return self.boundary
        return self._micro == self.accumulate - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; batches are moved to the rank's device."""
        self._refuse_pipeline("engine(…)")
        args = tuple(map(self._on_device, args))
        kwargs = {name: self._on_device(value) for name, value in kwargs.items()}
        if not (torch.is_grad_enabled() and self.module.training):
            return self._forward(args, kwargs)
        self.sharded.prepare_micro_batch(self.is_last_micro_batch)
        with self.timer.region("forward"):
            return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._calls is None:
            return self.module(*args, **kwargs)
        return self._calls(args, kwargs, self._batch_number)

    @property
    def _batch_number(self) -> int:
        return self.updates * self.accumulate + self._micro

    def train_batch(self, batches: Iterator[Any]) -> torch.Tensor:
        """Trains one update on the next `gradient_accumulation_steps` batches of an iterator.

        On a pipeline this is the only way to train: each rank of it is handed the same batches.
        Returns the mean loss over the micro-batches and data ranks, the same on every rank.
        """
        if not self.module.training:
            raise UserError("engine.train_batch", None, "is called after eval()", "call train()")
        taken = self._next(batches)
        if self._calls is None or self.context.pipeline is None:
            total = torch.zeros((), device=self.world.device)
            for batch in taken:
                loss = self(**batch).loss
                self.backward(loss)
                total += loss.detach().float()
                self.step()
            return self._mean(total)
        parts = self.world.layout.context
        with self.timer.region("pipeline"):
            losses = self._calls.learn(
                taken,
                lambda loss: self.scaler.scale(loss * parts / self.accumulate),
                self.sharded.prepare_micro_batch,
                self._batch_number,
            )
        self._micro = self.accumulate - 1
        self._has_gradient = True
        self.step()
        return self._mean(self._calls.total(losses))

    def eval_batch(self, batches: Iterator[Any]) -> torch.Tensor:
        """The mean loss of the next `gradient_accumulation_steps` batches, without training."""
        taken = self._next(batches)
        with self.sharded.evaluation():
            if self._calls is not None and self.context.pipeline is not None:
                return self._mean(self._calls.total(self._calls.losses(taken)))
            losses = [self(**batch).loss.float() for batch in taken]
            return self._mean(torch.stack(losses).sum())

    def _next(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """The micro-batches of one update."""
        if not isinstance(batches, Iterator):
            problem = f"is a {type(batches).__name__}, which would begin anew at every call"
            raise UserError("batches", None, problem, "pass an iterator: iter(loader)")
        taken = list(itertools.islice(batches, self.accumulate))
        if len(taken) < self.accumulate:
            problem = f"ended after {len(taken)} of {self.accumulate} micro-batches of an update"
            raise UserError("batches", None, problem, "repeat the loader, e.g. itertools.cycle")
        for batch in taken:
            if not isinstance(batch, Mapping):
                problem = f"yields a {type(batch).__name__}, not the model's arguments by name"
                raise UserError("batches", None, problem, 'yield {"input_ids": …, "labels": …}')
        return [{name: self._on_device(value) for name, value in b.items()} for b in taken]

    def _mean(self, total: torch.Tensor) -> torch.Tensor:
        """The mean of a sum over micro-batches, which all ranks of a data rank have in common."""
        if self.world.size > 1:
            dist.all_reduce(total)
        return total / (self.accumulate * self.world.size)

    def _refuse_pipeline(self, call: str) -> None:
        if self.context.pipeline is not None:
            problem = "a pipeline's stages run the micro-batches of an update together"
            remedy = "use engine.train_batch(iterator), and engine.eval_batch(iterator)"
            raise UserError(call, None, problem, remedy)

    def _on_device(self, value: Any) -> Any:
        return value.to(self.world.device) if isinstance(value, torch.Tensor) else value

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Accumulates this micro-batch's gradient.

        An update uses the mean of `loss` over the ranks and its micro-batches.
        """
        self._refuse_pipeline("engine.backward(loss)")
        self.sharded.prepare_micro_batch(self.is_last_micro_batch)
        with self.timer.region("backward"), self.context.active():
            self.scaler.scale(loss / self.accumulate).backward(retain_graph=retain_graph)
        self._has_gradient = True

    def step(self) -> bool:
        """Updates the parameters on every `gradient_accumulation_steps`-th call.

        Call it after each `backward`; returns whether this call updated.
        """
        if not self._has_gradient:
            raise RuntimeError("engine.step() needs engine.backward(loss) before it")
        last = self.is_last_micro_batch
        self._has_gradient = False
        if not last:
            self._micro += 1
            return False
        self._micro = 0
        with self.timer.region("step"):
            self.grad_norm = self._update()
        self.updates += 1
        return True

    def breakdown(self) -> dict[str, Any]:
        """Seconds per update by part, and the traffic of each collective, since the last call."""
        if not self.timer.on:
            raise UserError(
                "config.breakdown", False, "nothing was measured", "initialize with breakdown: True"
            )
        window = self.timer.flush(self.updates - self._last_breakdown)
        self._last_breakdown = self.updates
        return {"updates": window.steps, "seconds": window.breakdown(), "comms": window.comms()}

    def train(self, mode: bool = True) -> Engine:
        """Sets training (or evaluation) mode, and shards parameters gathered by evaluation."""
        self.sharded.reshard()
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Sets evaluation mode; the same as `train(False)`."""
        return self.train(False)

    def tensors(self) -> dict[str, Any]:
        """All tensors of a checkpoint, by name."""
        return tensors_of(self.sharded, self.optimizer)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Saves model, optimizer and `extra` (JSON) atomically, under the number of updates."""
        store = CheckpointStore(
            Path(folder), keep=1 << 30, background=False, group=self.world.checkpoint
        )
        trainer = {
            "updates": self.updates,
            "scaler": self.scaler.state_dict(),
            "extra": extra or {},
        }
        store.save(
            self.updates,
            self.tensors(),
            trainer,
            self.config.model_dump_json(),
            lambda _: None,
            None,
        )

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Loads the newest (or the given) checkpoint, saved on any number of ranks at any stage.

        Returns the `extra` it was saved with.
        """
        checkpoint = choose_checkpoint(str(folder), Path(folder))
        assert checkpoint is not None
        check_whole(checkpoint, self.world.control)
        trainer = read_trainer(checkpoint)
        prime_optimizer(self.optimizer)
        load_tensors(checkpoint, self.tensors(), self.world.checkpoint)
        self.sharded.updated()
        self.updates = int(trainer["updates"])
        if trainer["scaler"]:
            self.scaler.load_state_dict(trainer["scaler"])
        return dict(trainer["extra"])


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer
    | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    | None = None,
    config: dict[str, Any] | EngineConfig | None = None,
    fill: Fill | None = None,
) -> Engine:
    """Shards a model over the ranks that torchrun started (one without it) and returns an engine.

    `optimizer`: None for AdamW with decay groups; a function of parameter groups; or an optimizer
    over model.parameters() that has not stepped yet, which is rebuilt over the shards. `fill`:
    writes the values into the shards of a model whose parameters are on `meta`.
    """
    if not isinstance(model, nn.Module):
        problem = f"is a {type(model).__name__}, not a torch.nn.Module"
        raise UserError("model", model, problem, "pass the model itself")
    if not isinstance(config, EngineConfig):
        config = _check({} if config is None else config)
    parallel = config.parallel
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    like = None
    if parallel.uses_model_parallelism:
        if parallel.pipeline > 1 and fill is not None:
            problem = "stages are cut from a model with its values, and this one has none yet"
            remedy = "build the model without zero.Init, or on every rank as it is"
            raise UserError("config.parallel.pipeline", parallel.pipeline, problem, remedy)
        like = source_of(model, config.as_run(), ranks)
    spread = ranks // (parallel.pipeline * parallel.tensor)
    shard = shard_size(parallel.zero, parallel.dp_shard_size, spread)
    if spread % shard:
        problem = f"does not divide the {spread} ranks"
        raise UserError("parallel.dp_shard_size", shard, problem, "use a divisor of it")
    first_clash(config)
    check_secondary(parallel, spread)
    layout = layout_of(parallel, ranks)
    device = next(model.parameters()).device.type
    if torch.cuda.is_available() and device in ("cuda", "cpu", "meta"):
        world = join_world("cuda", "nccl", config.timeout, layout)
    else:
        _check_cpu(config.precision)
        world = join_world("cpu", "gloo", config.timeout, layout)
    if like is not None:
        try_model(like, config.as_run(), world)
    return Engine(model, optimizer, config, world, fill, like)


@torch.no_grad()
def _copy_from_first(model: nn.Module) -> None:
    """Broadcasts rank 0's values: ranks may have initialised the model from different seeds."""
    if dist.get_world_size() == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        data = tensor.detach().contiguous()
        # As bytes, since gloo does not support every dtype.
        dist.broadcast(data.reshape(-1).view(torch.uint8), 0)
        if data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data)


def _check_cpu(precision: str) -> None:
    """Rejects CPUs that advertise half-precision instructions which kill the process.

    The environment variables that disable those must be set before Python starts.
    """
    from shardwise.core.cpu_probe import cpu_env

    for name, value in cpu_env(precision).items():
        if os.environ.get(name) != value:
            problem = "this CPU advertises instructions for it that it does not execute"
            remedy = f"start Python with {name}={value}, or use fp32"
            raise UserError("config.precision", precision, problem, remedy)


def _check(values: dict[str, Any]) -> EngineConfig:
    if not isinstance(values, dict):
        problem = f"is a {type(values).__name__}, not a dictionary"
        raise UserError("config", values, problem, 'pass e.g. {"parallel": {"zero": 3}}')
    values = copy.deepcopy(values)
    for note in rename(values, table=RENAMED_HERE):
        warnings.warn(f"shardwise.initialize: {note}", FutureWarning, stacklevel=3)
    try:
        return EngineConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            matches = difflib.get_close_matches(field, list(EngineConfig.model_fields), n=1)
            problem = "unknown key"
            remedy = f"did you mean {matches[0]}?" if matches else "remove it"
        else:
            problem = f"is not accepted ({wanted(first)})"
            remedy = "give a value that is"
        raise UserError(f"config.{field}", first["input"], problem, remedy) from None


def _rebuilt(
    given: Any,
    before: dict[str, nn.Parameter],
    after: dict[str, nn.Parameter],
    config: EngineConfig,
) -> torch.optim.Optimizer:
    """The user's optimizer over the sharded parameters, or AdamW if `given` is None."""
    if given is None:
        return torch.optim.AdamW(
            decay_groups(after, config.weight_decay),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
    if not isinstance(given, torch.optim.Optimizer):
        built = given(decay_groups(after, config.weight_decay))
        assert isinstance(built, torch.optim.Optimizer), (
            "the optimizer function must return a torch optimizer"
        )
        return built
    if given.state:
        problem = "has stepped already, and its state belongs to the unsharded parameters"
        remedy = "pass a fresh optimizer, and load its state with engine.load"
        raise UserError("optimizer", type(given).__name__, problem, remedy)
    names: dict[int, list[str]] = {}  # a tied parameter has another one on another stage
    for name, parameter in before.items():
        names.setdefault(id(parameter), []).append(name)
    for group in given.param_groups:
        missing = [p for p in group["params"] if id(p) not in names]
        if missing:
            problem = f"holds {len(missing)} tensors that are no parameters of the model"
            remedy = "build it over model.parameters()"
            raise UserError("optimizer", type(given).__name__, problem, remedy)
        group["params"] = [after[n] for p in group["params"] for n in names[id(p)] if n in after]
        if len({getattr(p, "device_mesh", None) for p in group["params"]}) > 1:
            # One call cannot update parameters that are sharded over different ranks (experts).
            group |= {key: False for key in ("fused", "foreach") if key in group}
    return given
