"""`safe_get_*` and `safe_set_*`: a parameter's master value, gradient and optimizer states, full or this rank's part.

The functions for full tensors are collective. A rank's part is its block of rows, in the parameter's own number of
dimensions; DeepSpeed's is a flat piece. Gradients are available from the `backward` of an update's last micro-batch
(stages 2 and 3: of any) to the `step` that uses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.core.errors import UserError
from shardwise.deepspeed.partition import full_tensor, keep_rows
from shardwise.deepspeed.refused import refuse

if TYPE_CHECKING:
    from shardwise.train.engine import Engine

OWNER = "_shardwise_engine"


def adopt(engine: Engine) -> None:
    """Links each parameter to the engine that trains it, which these functions need."""
    for parameter in engine.sharded.parameters.values():
        setattr(parameter, OWNER, weakref.ref(engine))


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The full fp32 master value; None for a frozen parameter."""
    return None if _engine(param) is None else full_tensor(param)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets the master value from a full tensor that is the same on all ranks."""
    _require(param)
    keep_rows(param, value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The full gradient, averaged over the ranks; None if there is none."""
    return None if _engine(param) is None or param.grad is None else full_tensor(param.grad)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the gradient that the next `step` will use."""
    _require(param)
    keep_rows(_gradient(param), value)


def safe_update_full_grad_vectorized(
    param_list: list[torch.nn.Parameter], update_func: Callable[[torch.Tensor, Any], torch.Tensor]
) -> None:
    """Replaces each full gradient by the function's result for it and its parameter."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """The full state of that name, e.g. exp_avg; None for a frozen parameter."""
    return None if _engine(param) is None else full_tensor(_state(param, optim_state_key))


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets the state of that name from a full tensor that is the same on all ranks."""
    keep_rows(_state(param, optim_state_key, change=True), value)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's rows of the master value."""
    return None if _engine(param) is None else _local(param)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's rows of the master value."""
    _require(param)
    _set_local(param, value)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's rows of the gradient."""
    return None if _engine(param) is None or param.grad is None else _local(param.grad)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets this rank's rows of the gradient."""
    _require(param)
    _set_local(_gradient(param), value)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """This rank's rows of the state of that name."""
    return None if _engine(param) is None else _local(_state(param, optim_state_key))


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets this rank's rows of the state of that name."""
    _set_local(_state(param, optim_state_key, change=True), value)


def _engine(param: torch.Tensor) -> Engine | None:
    link = getattr(param, OWNER, None)
    if link is None and param.requires_grad:
        problem = "is no parameter that an engine trains (it may be a copy gathered for a forward pass)"
        raise UserError("param", list(param.shape), problem, "take it from engine.named_parameters()")
    return None if link is None else link()


def _require(param: torch.Tensor) -> Engine:
    engine = _engine(param)
    if engine is None:
        raise UserError("param", list(param.shape), "is frozen", "take a parameter that is trained")
    return engine


def _gradient(param: torch.Tensor) -> torch.Tensor:
    if param.grad is None:
        problem = "has no gradient now"
        raise UserError("param", list(param.shape), problem, "call it between engine.backward and engine.step")
    return param.grad


def _state(param: torch.Tensor, key: str, change: bool = False) -> torch.Tensor:
    engine = _require(param)
    states = engine.optimizer.state.get(param, {})
    if not states:  # an optimizer that keeps its states elsewhere still lists them by name
        name = next(n for n, p in engine.sharded.parameters.items() if p is param)
        start = f"optimizer.{name}."
        states = {n.removeprefix(start): v for n, v in engine.tensors().items() if n.startswith(start)}
        if states and change:  # those are copies
            raise refuse("utils.safe_set_…_optimizer_state", "not for an offloaded optimizer; change its checkpoint")
    if key not in states:
        has = ", ".join(states) or "none before the first step"
        raise UserError("optim_state_key", key, "is no state of this optimizer", f"it has {has}")
    state = states[key]
    assert isinstance(state, torch.Tensor)
    return state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


@torch.no_grad()
def _set_local(tensor: torch.Tensor, value: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if value.numel() != local.numel():
        raise UserError("value", list(value.shape), f"this rank's part is {list(local.shape)}", "give that shape")
    local.copy_(value.reshape(local.shape))
