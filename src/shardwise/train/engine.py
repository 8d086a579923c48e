"""For people with a loop of their own: `initialize` puts a model and an optimizer on the mesh and hands back an engine.

    engine = shardwise.initialize(model, config={"parallel": {"zero": 3}, "precision": "bf16"})
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()

Every call of `backward` is one micro-batch; every `gradient_accumulation_steps`-th call of `step` updates the
parameters. The engine uses the same sharding, clipping, loss scaling and checkpoints as `shardwise train`.
"""

from __future__ import annotations

import copy
import difflib
import os
import warnings
from collections.abc import Callable
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
from shardwise.config.combinations import axes_used, first_clash
from shardwise.config.explain import wanted
from shardwise.config.renamed import RENAMED, rename
from shardwise.config.resolve import check_secondary
from shardwise.config.schema import Data, LossScale, Model, Offload, Parallel, Run, Source
from shardwise.config.section import Section
from shardwise.config.units import Duration, Number, Whole
from shardwise.core.errors import UserError
from shardwise.distributed.mesh import World, join_world, layout_of
from shardwise.nn.models.build import materialise
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
from shardwise.parallel.zero.update import Update
from shardwise.train.state import prime_optimizer, tensors_of

Fill = Callable[[nn.Module], None]
RENAMED_HERE = RENAMED | {"accumulate": "gradient_accumulation_steps", "clip": "max_grad_norm"}


class EngineConfig(Section):
    """What `initialize` takes."""

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
        """What `parallelize` takes: these settings as a run's, without a model and data of its own."""
        settings = {
            name: getattr(self, name) for name in ("parallel", "precision", "offload", "timeout")
        }
        return Run(model=Model(name="given"), data=Data(train=(Source(path="given"),)), **settings)


class Engine:
    """A sharded model that is called like the model, and steps like an optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        config: EngineConfig,
        world: World,
        fill: Fill | None = None,
    ) -> None:
        self.config, self.world = config, world
        before = dict(model.named_parameters())
        values: dict[str, torch.Tensor] = {}
        if fill is None:
            model.to(world.device)
            _copy_from_first(model)
            if splits_masters(config.offload, config.precision):
                values = {n: p.detach() for n, p in model.named_parameters()}
                store_in_bf16(model)
        self.timer = timer_for(world.device, config.breakdown, config.breakdown)

        def give_values(model: nn.Module, device: torch.device) -> None:
            if fill is not None:
                materialise(model, device)
                fill(model)

        self.sharded, _ = parallelize(
            model, config.as_run(), world, timer=self.timer, materialise=give_values
        )
        self.module = model
        self.optimizer = _rebuilt(optimizer, before, self.sharded.parameters, config)
        if config.offload.optimizer != "none":
            self.optimizer = self._offloaded(self.optimizer, values)
            values = {}
        self.scaler = LossScaler(
            world.device.type, config.loss_scale, enabled=config.precision == "fp16"
        )
        # A user may accumulate more than was said (set_gradient_accumulation_boundary), so gradients are kept in fp32.
        eager = offloaded_share(config.offload, config.precision, config.max_grad_norm)
        self._update = Update(
            self.sharded, self.optimizer, self.scaler, config.max_grad_norm, eager
        )
        self.updates, self._micro, self._inside, self._told = 0, 0, False, 0
        self.accumulate = config.gradient_accumulation_steps
        self.boundary: bool | None = (
            None  # True or False: the user's own word on whether `step` updates
        )
        self.grad_norm: torch.Tensor | None = None
        watch_collectives(model, self.timer)

    def _offloaded(
        self, built: torch.optim.Optimizer, values: dict[str, torch.Tensor]
    ) -> OffloadedOptimizer:
        """The same optimizer with its states (and, at stage 3, the parameters) where the config wants them."""
        config, world = self.config, self.world
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
        for name, rows in masters(result).items() if values else ():
            fill_local(self.sharded.parameters[name], values[name], rows)
        return result

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the next `step` will update the parameters."""
        return self._micro == self.accumulate - 1 if self.boundary is None else self.boundary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; batches are moved to the rank's device."""
        device = self.world.device
        args = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)
        kwargs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        if not (torch.is_grad_enabled() and self.module.training):
            return self.module(*args, **kwargs)
        self.sharded.prepare_micro_batch(self.is_last_micro_batch)
        with self.timer.region("forward"):
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Adds this micro-batch's gradient: the mean of `loss` over ranks and the micro-batches of an update."""
        self.sharded.prepare_micro_batch(self.is_last_micro_batch)
        with self.timer.region("backward"):
            self.scaler.scale(loss / self.accumulate).backward(retain_graph=retain_graph)
        self._inside = True

    def step(self) -> bool:
        """After each `backward`: updates on every `gradient_accumulation_steps`-th call, and says whether it did."""
        if not self._inside:
            raise RuntimeError("engine.step() needs engine.backward(loss) before it")
        last = self.is_last_micro_batch
        self._inside, self._micro = False, 0 if last else self._micro + 1
        if not last:
            return False
        with self.timer.region("step"):
            self.grad_norm = self._update()
        self.updates += 1
        return True

    def breakdown(self) -> dict[str, Any]:
        """Seconds per update in each part, and what each kind of collective moved, since the last call of this."""
        if not self.timer.on:
            raise UserError(
                "config.breakdown", False, "nothing was measured", "initialize with breakdown: True"
            )
        window = self.timer.flush(self.updates - self._told)
        self._told = self.updates
        return {"updates": window.steps, "seconds": window.breakdown(), "comms": window.comms()}

    def train(self, mode: bool = True) -> Engine:
        """Training mode; leaving evaluation puts the shards back."""
        self.sharded.reshard()
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Evaluation mode."""
        return self.train(False)

    def tensors(self) -> dict[str, Any]:
        """Every tensor that a checkpoint holds, by name."""
        return tensors_of(self.sharded, self.optimizer)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Saves model, optimizer and whatever JSON you add, atomically, under the number of updates."""
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
        """Loads the newest (or the given) checkpoint, on any number of ranks and any stage; returns your `extra`."""
        found = choose_checkpoint(str(folder), Path(folder))
        assert found is not None
        check_whole(found, self.world.control)
        trainer = read_trainer(found)
        prime_optimizer(self.optimizer)
        load_tensors(found, self.tensors(), self.world.checkpoint)
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
    """Shards a model over the ranks that torchrun started (or runs it on one) and returns an engine for your own loop.

    `optimizer`: None for AdamW with decay groups; a function of parameter groups; or an optimizer built over
    model.parameters() that has not stepped yet, which is rebuilt over the shards. `fill`: for a model whose
    parameters are on `meta`: writes the values into its shards.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            "model",
            model,
            f"is a {type(model).__name__}, not a torch.nn.Module",
            "pass the model itself",
        )
    checked = (
        config if isinstance(config, EngineConfig) else _check({} if config is None else config)
    )
    cuda = torch.cuda.is_available() and next(model.parameters()).device.type in (
        "cuda",
        "cpu",
        "meta",
    )
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    shard = shard_size(checked.parallel.zero, checked.parallel.dp_shard_size, ranks)
    if ranks % shard:
        raise UserError(
            "parallel.dp_shard_size",
            shard,
            f"does not divide the {ranks} ranks",
            "use a divisor of it",
        )
    if checked.parallel.beyond_data:
        problem = "in your own loop the model is divided by ZeRO alone"
        raise UserError(
            "config.parallel",
            ", ".join(axes_used(checked.parallel)),
            problem,
            "use shardwise train (or Trainer) for these axes",
        )
    first_clash(checked)
    check_secondary(checked.parallel, ranks)
    if not cuda:
        _check_cpu(checked.precision)
    layout = layout_of(checked.parallel, ranks)
    world = join_world(
        "cuda" if cuda else "cpu", "nccl" if cuda else "gloo", checked.timeout, layout
    )
    return Engine(model, optimizer, checked, world, fill)


@torch.no_grad()
def _copy_from_first(model: nn.Module) -> None:
    """Rank 0's values everywhere: shards of models that were seeded differently would make up none of them."""
    if dist.get_world_size() == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        data = tensor.detach().contiguous()
        dist.broadcast(
            data.reshape(-1).view(torch.uint8), 0
        )  # as bytes: gloo does not know every type
        if data.data_ptr() != tensor.data_ptr():
            tensor.copy_(data)


def _check_cpu(precision: str) -> None:
    """Some CPUs advertise half-precision instructions that kill the process; the cap must be there at the start."""
    from shardwise.core.cpu_probe import cpu_env

    for name, value in cpu_env(precision).items():
        if os.environ.get(name) != value:
            problem = "this CPU advertises instructions for it that it does not execute"
            raise UserError(
                "config.precision",
                precision,
                problem,
                f"start Python with {name}={value}, or use fp32",
            )


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
        known = difflib.get_close_matches(field, list(EngineConfig.model_fields), n=1)
        if first["type"] == "extra_forbidden":
            remedy = f"did you mean {known[0]}?" if known else "remove it"
            raise UserError(f"config.{field}", first["input"], "unknown key", remedy) from None
        problem = f"is not accepted ({wanted(first)})"
        raise UserError(
            f"config.{field}", first["input"], problem, "give a value that is"
        ) from None


def _rebuilt(
    given: Any,
    before: dict[str, nn.Parameter],
    after: dict[str, nn.Parameter],
    config: EngineConfig,
) -> torch.optim.Optimizer:
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
    names = {id(p): n for n, p in before.items()}
    for group in given.param_groups:
        missing = [p for p in group["params"] if id(p) not in names]
        if missing:
            problem = f"holds {len(missing)} tensors that are no parameters of the model"
            raise UserError(
                "optimizer", type(given).__name__, problem, "build it over model.parameters()"
            )
        group["params"] = [after[names[id(p)]] for p in group["params"] if names[id(p)] in after]
    return given
