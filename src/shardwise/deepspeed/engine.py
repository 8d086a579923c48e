"""`DeepSpeedEngine`: DeepSpeed's methods on the engine of `shardwise.initialize`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.core.dtypes import COMPUTE
from shardwise.core.errors import RunFailed, UserError
from shardwise.deepspeed import fragments, store
from shardwise.deepspeed.data import DeepSpeedDataLoader
from shardwise.deepspeed.mpu import ModelParallelUnit
from shardwise.deepspeed.partition import ZeroParamStatus, full_tensor, keep_rows
from shardwise.deepspeed.refused import refuse
from shardwise.deepspeed.settings import EngineBatchSizes
from shardwise.train.engine import Engine

NOT_HERE = {
    "train_batch": "it is of the pipeline engine; write forward, backward, step",
    "eval_batch": "it is of the pipeline engine; call the engine under torch.no_grad()",
    "offload_states": "set offload in the config",
    "reload_states": "set offload in the config",
    "coalesce_grad_reduction": "use no_sync() at stage 1, or set_gradient_accumulation_boundary(False)",
    "allreduce_gradients": "backward reduces them",
}


class DeepSpeedEngine(nn.Module):
    """A sharded model with its optimizer and scheduler; unknown attributes are forwarded to the model."""

    def __init__(self, core: Engine, config: dict[str, Any], batch: EngineBatchSizes, scheduler: Any) -> None:
        super().__init__()
        self.module = core.module
        self._core = core
        self._config = config
        self._batch = batch
        self.optimizer = core.optimizer
        self.lr_scheduler = scheduler
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._applied, self._in_no_sync = False, False
        fragments.adopt(core)
        if self.zero_optimization_stage() == 3:
            for number, parameter in enumerate(core.module.parameters()):
                _mark(parameter, number)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        if name in NOT_HERE:
            raise refuse(f"engine.{name}", NOT_HERE[name])
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}, nor has the model") from None

    # The step.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward."""
        return self._core(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Accumulates the micro-batch's gradient, averaged over ranks and (by default) micro-batches."""
        if not isinstance(loss, torch.Tensor):
            problem = f"is a {type(loss).__name__}, not a tensor, so there is nothing to go back through"
            raise UserError("loss", loss, problem, "pass the loss as the model returned it, without .item() or float()")
        if loss.numel() != 1:
            raise UserError("loss", tuple(loss.shape), "is a tensor of this shape, not a single number", "reduce it")
        if not loss.requires_grad:
            problem = "does not depend on the model's parameters (no_grad, detach, or .item() on the way)"
            raise UserError("loss", None, problem, "compute it from the engine's output with gradients on")
        steps = self.gradient_accumulation_steps()
        self._core.backward(loss if scale_wrt_gas else loss * steps, retain_graph)
        return loss / steps if scale_wrt_gas else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Call after each backward; updates parameters and learning rate at accumulation boundaries."""
        if self._in_no_sync:
            raise UserError("engine.step()", None, "is called inside no_sync()", "call it after the context")
        updated = self._core.step()
        self.micro_steps += 1
        self._applied = False
        if not updated:
            return
        assert self._core.grad_norm is not None
        # Scaled gradients that overflowed are what makes the norm infinite, and the scaler skip the update.
        self._applied = not self.fp16_enabled() or bool(self._core.grad_norm.isfinite())
        if not self._applied:
            self.skipped_steps += 1
            if trouble := self._core.scaler.trouble():
                raise RunFailed(trouble)
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        every = self.steps_per_print()
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            message = (
                f"step {self.global_steps}, skipped {self.skipped_steps}, rate {self.get_lr()}, mom {self.get_mom()}"
            )
            print(message, flush=True)
        if self._core.config.breakdown and self.global_steps % (every or 10) == 0:
            breakdown = self._core.breakdown()
            if self.global_rank == 0:
                print(f"  seconds per update {breakdown['seconds']}\n  collectives {breakdown['comms']}", flush=True)

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the parameters."""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the parameters."""
        return self._core.is_last_micro_batch

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Overrides the accumulation boundary, from the forward on; None resets it."""
        self._core.boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for backward without gradient communication; stages 0 and 1."""
        if self.zero_optimization_stage() >= 2:
            problem = "does not go with stages 2 and 3, which divide gradients as they arise"
            raise UserError("engine.no_sync()", None, problem, "use stage 1, or gradient_accumulation_steps")
        if self._in_no_sync:
            raise UserError("engine.no_sync()", None, "is called inside itself", "leave the inner one out")
        boundary = self._core.boundary
        self._in_no_sync = True
        self._core.boundary = False
        try:
            yield
        finally:
            self._in_no_sync, self._core.boundary = False, boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Sets training mode."""
        self._core.train(mode)
        self.training = mode
        return self

    def eval(self) -> DeepSpeedEngine:
        """Sets evaluation mode."""
        return self.train(False)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Not supported: compile the model before `initialize`."""
        raise refuse("engine.compile", "use torch.compile on the model's blocks before initialize")

    def destroy(self) -> None:
        """Does nothing: only the process group outlives the engine, and the script may still need it."""

    # What it is made of.

    def train_batch_size(self) -> int:
        """Samples per update, over all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._batch.accumulate

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per update, per rank and forward, and micro-batches per update."""
        return self._batch.train, self._batch.micro, self._batch.accumulate

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the samples per update, by the number of micro-batches."""
        per_forward = self._batch.micro * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % per_forward:
            problem = f"is no multiple of {self._batch.micro} samples × {self.dp_world_size} ranks"
            raise UserError("train_batch_size", train_batch_size, problem, f"use a multiple of {per_forward}")
        self._batch = EngineBatchSizes(train_batch_size, self._batch.micro, train_batch_size // per_forward)
        self._core.accumulate = self._batch.accumulate

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples per forward, which the script must then pass; accumulation is unchanged."""
        accumulate = self._batch.accumulate
        self._batch = EngineBatchSizes(micro_batch_size * accumulate * self.dp_world_size, micro_batch_size, accumulate)

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return int(self._core.config.parallel.zero)

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def gradient_clipping(self) -> float:
        """Maximum gradient norm; 0 = no clipping."""
        return float(self._core.config.max_grad_norm or 0.0)

    def steps_per_print(self) -> int | None:
        """Number of updates between log lines."""
        return self._config.get("steps_per_print")

    def fp16_enabled(self) -> bool:
        """Whether it computes in fp16."""
        return self._core.config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether it computes in bf16."""
        return self._core.config.precision == "bf16"

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of computation and of gradient accumulation."""
        return COMPUTE[self._core.config.precision], torch.float32

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.fp16_enabled() and self._core.config.loss_scale.value == "dynamic"

    def loss_scale(self) -> float:
        """Current loss scale; 1 without fp16."""
        return self._scale()

    @property
    def cur_scale(self) -> float:
        """Current loss scale; 1 without fp16."""
        return self._scale()

    def get_lr(self) -> list[Any]:
        """Learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Betas (or momentum) of each parameter group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last update, before clipping."""
        return None if self._core.grad_norm is None else float(self._core.grad_norm)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._core.world.device

    @property
    def local_rank(self) -> int:
        """Rank of this process on its host."""
        return self._core.world.local_rank

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self._core.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._core.world.size

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that see different data."""
        return self._core.data_parallel_world_size

    def get_data_parallel_rank(self) -> int:
        """Which part of the data this rank reads; ranks of a tensor or sequence group read the same."""
        return self._core.data_parallel_rank

    @property
    def mp_world_size(self) -> int:
        """Number of ranks of a tensor group."""
        return self._core.world.layout.tensor

    @property
    def seq_parallel_world_size(self) -> int:
        """Number of ranks that share each sequence."""
        return self._core.world.layout.context

    @property
    def mpu(self) -> ModelParallelUnit | None:
        """Megatron's names for the axes; None without axes."""
        return ModelParallelUnit(self._core.world) if self._core.config.parallel.uses_model_parallelism else None

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Returns a loader of this rank's share of a dataset."""
        if route not in ("train", "eval", "predict"):
            raise refuse(f"engine.deepspeed_io(route={route!r})", "use train, eval or predict")
        if route != "train" and data_sampler is None:
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=self.dp_world_size, rank=self.get_data_parallel_rank(), shuffle=False
            )
        drop_last = bool(self._config.get("dataloader_drop_last", False))
        return DeepSpeedDataLoader(
            dataset, batch_size or self._batch.micro, self.get_data_parallel_rank(), self.dp_world_size, collate_fn,
            drop_last, num_local_io_workers or 0, data_sampler,
        )  # fmt: skip

    # What it keeps.

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves a checkpoint under a tag, on all ranks; the default tag is global_step<N>."""
        counters = {
            name: getattr(self, name) for name in ("global_steps", "global_samples", "skipped_steps", "micro_steps")
        }
        extra = counters | {
            "client_state": client_state or {},
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "ds_config": self._config,
        }
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        store.save(self._core, Path(save_dir), name, extra, save_latest, exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Loads a tag (default: the latest), on all ranks; returns its path and the client state, or (None, None)."""
        if custom_load_fn is not None:
            raise refuse("engine.load_checkpoint(custom_load_fn=…)", "use engine.load_module_state_dict")
        folder = store.find(Path(load_dir), tag)
        if folder is None:
            return None, None
        states = load_optimizer_states and not load_module_only
        extra = store.load(self._core, folder, load_module_strict, states)
        if states:
            for group, saved in zip(self.optimizer.param_groups, extra["groups"], strict=True):
                group.update(saved)
        if not load_module_only:
            for name in ("global_steps", "global_samples", "skipped_steps", "micro_steps"):
                setattr(self, name, extra[name])
            if load_lr_scheduler_states and self.lr_scheduler is not None and extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        return str(folder.parent), extra["client_state"]

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Full (unsharded) state dict of the model, on the host; collective, at any stage."""
        return self._state_dict(prefix, exclude_frozen_parameters, torch.float32, on_all=True)

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """`module_state_dict` under the engine's names, which begin with `module.`."""
        return self._state_dict(f"{prefix}module.", False, torch.float32, on_all=True)

    @torch.no_grad()
    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None, **fetch: Any
    ) -> None:
        """Loads full tensors that are the same on all ranks (or {"module": those}) into the model."""
        if custom_load_fn is not None:
            raise refuse("engine.load_module_state_dict(custom_load_fn=…)", "pass the converted state")
        values = checkpoint["module"] if isinstance(checkpoint.get("module"), dict) else checkpoint
        self._core.sharded.reshard()
        targets = self.module.state_dict(keep_vars=True)
        wrong = sorted(set(targets) ^ set(values))
        if wrong and strict:
            raise UserError(
                "state_dict", wrong[0], f"does not fit the model ({len(wrong)} names)", "or use strict=False"
            )
        for name in targets.keys() & values.keys():
            if targets[name].shape != values[name].shape:
                problem = f"has shape {list(values[name].shape)}, the model's is {list(targets[name].shape)}"
                raise UserError(f"state_dict.{name}", None, problem, "load the state of the same model")
            keep_rows(targets[name], values[name])

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the model in its compute dtype, as one file, at any stage; collective."""
        state = self._state_dict("", exclude_frozen_parameters, COMPUTE[self._core.config.precision], on_all=False)
        if self.global_rank == 0:
            target = Path(save_dir) / save_filename
            target.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, target.with_name(f".{save_filename}"))
            target.with_name(f".{save_filename}").rename(target)
        torch.distributed.barrier(group=self._core.world.control)
        return True

    save_fp16_model = save_16bit_model

    def _state_dict(self, prefix: str, without_frozen: bool, dtype: torch.dtype, on_all: bool) -> dict[str, Any]:
        self._core.sharded.reshard()
        result: dict[str, Any] = {}
        copies: dict[int, torch.Tensor] = {}
        for name, value in self.module.state_dict(keep_vars=True).items():
            if without_frozen and isinstance(value, nn.Parameter) and not value.requires_grad:
                continue
            if id(value) not in copies:
                full = full_tensor(value)
                keep = on_all or self.global_rank == 0
                kind = dtype if isinstance(value, nn.Parameter) and full.is_floating_point() else full.dtype
                if keep:
                    copies[id(value)] = full.to("cpu", kind)
                else:  # an empty tensor, where there can be one
                    copies[id(value)] = full[:0] if full.ndim else full
            result[prefix + name] = copies[id(value)]
        return result

    def _scale(self) -> float:
        return float(self._core.scaler.get_scale()) if self._core.scaler.is_enabled() else 1.0


def _mark(parameter: Any, number: int) -> None:
    """Sets the attributes by which scripts tell whether a parameter is sharded."""
    parameter.ds_id = number
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
    parameter.ds_shape = parameter.shape
    parameter.ds_numel = parameter.numel()
