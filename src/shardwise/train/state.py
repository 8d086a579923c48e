"""What a run is between two steps, and how it becomes a checkpoint and comes back.

Randomness is no state: each step seeds itself from (seed, step, rank), so resuming is exact by construction.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.store import check_whole, load_tensors, read_trainer
from shardwise.errors import UserError
from shardwise.zero.stages import ShardedModel


@dataclass
class Position:
    """Where the run stands: steps done, sequences consumed, tokens seen, best evaluation."""

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    best_step: int | None = None
    scaler: dict[str, Any] = field(default_factory=dict)

    def to_json(self, fingerprint: str) -> dict[str, Any]:
        """For trainer.json."""
        return asdict(self) | {"data_fingerprint": fingerprint}


def tensors_of(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor that must survive, by name: model.<parameter>, optimizer.<parameter>.<state>."""
    result: dict[str, Any] = {f"model.{n}": p for n, p in sharded.model.named_parameters()}
    persistent = set(sharded.model.state_dict().keys())
    result |= {f"model.{n}": b for n, b in sharded.model.named_buffers() if n in persistent}
    for name, parameter in sharded.parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            result[f"optimizer.{name}.{key}"] = value
    return result


def prime_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Allocates the optimizer's states, for a checkpoint to be read into them: one step with rate and gradients 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def restore(
    folder: Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer, fingerprint: str, control: Any, group: Any
) -> Position:
    """Reads a checkpoint into the parts; refuses damage, another model, other data."""
    check_whole(folder, control)
    values = read_trainer(folder)
    saved = values.pop("data_fingerprint")
    if saved != fingerprint:
        problem = "was saved while training on other data (or data settings), so its place in them means nothing"
        remedy = "bring the data back, choose another output folder, or start afresh with resume=never"
        raise UserError("resume", str(folder), problem, remedy)
    prime_optimizer(optimizer)
    load_tensors(folder, tensors_of(sharded, optimizer), group)
    return Position(**values)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
