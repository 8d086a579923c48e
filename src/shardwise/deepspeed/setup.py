"""`deepspeed.initialize`: builds an engine, its optimizer, loader and scheduler from a model and a config."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.core.errors import UserError
from shardwise.deepspeed import optimizers, schedules
from shardwise.deepspeed.comm import PORT, init_distributed
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.partition import release
from shardwise.deepspeed.refused import refuse
from shardwise.deepspeed.settings import print_account, read_config, settle
from shardwise.train import engine as core


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer, Any, Any]:
    """Returns the engine, the optimizer, a loader of `training_data` and the scheduler (None if there is none)."""
    if model is None:
        raise UserError("model", None, "is missing", "pass the model to train")
    if not isinstance(model, nn.Module):
        problem = f"is a {type(model).__name__}, not a torch.nn.Module"
        raise UserError("model", model, problem, "pass the model itself, e.g. of AutoModelForCausalLM.from_pretrained")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        problem = f"is a {type(optimizer).__name__}, neither an optimizer nor a function that makes one"
        raise UserError("optimizer", optimizer, problem, "pass one of torch's, or leave it to the config")
    if mpu is not None or mesh_param is not None:
        raise refuse(
            "initialize(mpu=…, mesh_param=…)",
            "leave it out; set tensor_parallel.autotp_size or sequence_parallel_size in the config",
        )
    values = read_config(config if config is not None else config_params, args)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    settings = settle(values, dist.get_world_size())
    if dist.get_rank() == 0:
        print_account(settings)

    replaced, fill = release(model)
    groups = [
        _with(group, replaced) for group in (model_parameters if model_parameters is not None else model.parameters())
    ]
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [_with(p, replaced) for p in group["params"]]
        built: torch.optim.Optimizer | None = optimizer
    else:
        built = optimizer(groups) if optimizer is not None else optimizers.configured(values, groups)
    if built is None:
        remedy = "add an optimizer block to the config, or pass optimizer=… to initialize"
        raise UserError("optimizer", None, "neither the config nor the script names one", remedy)
    model.float()
    sharded = core.initialize(model, built, settings.engine, fill)
    scheduler = _scheduler(lr_scheduler, values, sharded.optimizer)
    engine = DeepSpeedEngine(sharded, values, settings.batch, scheduler)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, sharded.optimizer, engine.training_dataloader, scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config to a script's arguments."""
    group = parser.add_argument_group("DeepSpeed", "served by shardwise")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; changes nothing here")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the DeepSpeed config, a JSON file")
    return parser


def _with(item: Any, replaced: dict[int, nn.Parameter]) -> Any:
    """A parameter or group, with parameters sharded by `zero.Init` replaced."""
    if isinstance(item, dict):
        return item | {"params": [_with(p, replaced) for p in item["params"]]}
    return replaced.get(id(item), item)


def _scheduler(scheduler: Any, config: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """The script's scheduler, built over our optimizer; else the config's."""
    if scheduler is None:
        return schedules.configured(config, optimizer)
    if callable(scheduler) and not hasattr(scheduler, "step"):
        return scheduler(optimizer)
    return scheduler
