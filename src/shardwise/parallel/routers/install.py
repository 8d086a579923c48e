"""Installs the losses and biases of routers in a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise.parallel.routers.bias import BiasUpdate
from shardwise.parallel.routers.find import find_routers, routers_of
from shardwise.parallel.routers.hooks import RouterLosses
from shardwise.parallel.routers.losses import RouterLossWeights
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
    """The router losses, which run with every forward, and the bias update after each step."""

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
    """The router losses of a model, for trials; None if neither loss is used."""
    routers = find_routers(config, task) if aux or z else None
    if routers is None:
        return None
    return RouterLosses(
        routers.modules(model), RouterLossWeights(aux, z, routers.top_k), group=group
    )


def watch_routers(model: Any, source: ModelSource, run: Run) -> RouterLosses | None:
    """The router losses of a model for evaluation; None if its loss includes none."""
    routers = routers_of(source, model)
    chosen = choose(run, routers, model)
    if routers is None or not (chosen.aux_loss or chosen.z_loss):
        return None
    terms = RouterLossWeights(chosen.aux_loss, chosen.z_loss, routers.top_k)
    return RouterLosses(routers.modules(model), terms, run.router.balance)


def install_routers(
    model: Any, source: ModelSource, run: Run, loads: ExpertLoads | None, world: World
) -> Routing | None:
    """Installs losses and bias updates for training; None for a dense model.

    Called after the model's axes are applied, before it is sharded and compiled.
    """
    routers = routers_of(source, model)
    if routers is None and loads is None:
        return None
    chosen = choose(run, routers, model)
    tokens = Tokens()
    group = None if world.context is None else world.context.get_group()
    top_k = 0 if routers is None else routers.top_k
    terms = RouterLossWeights(chosen.aux_loss, chosen.z_loss, top_k)
    sites = {} if routers is None else routers.modules(model)
    losses = RouterLosses(sites, terms, run.router.balance, tokens, group)
    if run.recompute == "full":
        losses.clear_behind(model)
    bias = None
    if loads is not None:
        loads.tokens = tokens
        if routers is not None and chosen.bias_update:
            bias = BiasUpdate(model, routers.biases, loads, world.mesh, chosen.bias_update)
    return Routing(losses, bias)
