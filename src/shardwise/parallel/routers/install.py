"""Puts the losses and biases of routers in place in a model that is being set up for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise.parallel.routers.bias import BiasUpdate
from shardwise.parallel.routers.find import find_routers, routers_of
from shardwise.parallel.routers.hooks import RouterLosses
from shardwise.parallel.routers.losses import Terms
from shardwise.parallel.routers.settings import choose
from shardwise.parallel.routers.token_groups import Tokens

if TYPE_CHECKING:
    from shardwise.config.objectives import Task
    from shardwise.config.schema import Run
    from shardwise.distributed.mesh import World
    from shardwise.nn.models.source import ModelSource
    from shardwise.parallel.expert.load_counts import ExpertLoads


@dataclass(frozen=True)
class Routing:
    """What a run does with a model's routers: `losses` knows the tokens of each forward, `bias` comes after a step."""

    losses: RouterLosses
    bias: BiasUpdate | None


def routers_in(
    model: Any,
    config: Any,
    task: Task,
    aux: float,
    z: float,
    group: dist.ProcessGroup | None = None,
) -> RouterLosses | None:
    """What watches the routers of a model, for trials; None where neither loss is asked for."""
    found = find_routers(config, task) if aux or z else None
    if found is None:
        return None
    return RouterLosses(found.modules(model), Terms(aux, z, found.top_k), group=group)


def watch_routers(model: Any, source: ModelSource, run: Run) -> RouterLosses | None:
    """What watches the routers of a model that is evaluated as it is; None where its loss has nothing of them."""
    found = routers_of(source, model)
    chosen = choose(run, found, model)
    if found is None or not (chosen.aux_loss or chosen.z_loss):
        return None
    terms = Terms(chosen.aux_loss, chosen.z_loss, found.top_k)
    return RouterLosses(found.modules(model), terms, run.router.balance)


def install_routers(
    model: Any, source: ModelSource, run: Run, loads: ExpertLoads | None, world: World
) -> Routing | None:
    """Before a model is sharded and compiled, after its axes are in place; None for a dense model."""
    found = routers_of(source, model)
    if found is None and loads is None:
        return None
    chosen, tokens = choose(run, found, model), Tokens()
    group = None if world.context is None else world.context.get_group()
    terms = Terms(chosen.aux_loss, chosen.z_loss, 0 if found is None else found.top_k)
    sites = {} if found is None else found.modules(model)
    losses = RouterLosses(sites, terms, run.router.balance, tokens, group)
    if run.recompute == "full":
        losses.clear_behind(model)
    bias = None
    if loads is not None:
        loads.tokens = tokens
        if found is not None and chosen.bias_update:
            bias = BiasUpdate(model, found.biases, loads, world.mesh, chosen.bias_update)
    return Routing(losses, bias)
