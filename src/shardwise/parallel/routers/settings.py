"""Coefficients and rates from the settings, or from the model's config for those left on auto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.core.errors import UserError
from shardwise.nn.adapters.layers import is_added
from shardwise.nn.models.build import FLAG
from shardwise.parallel.routers.find import Routers, routers_of

if TYPE_CHECKING:
    from shardwise.config.resolve import Resolution
    from shardwise.config.schema import Run
    from shardwise.nn.models.source import ModelSource

RATE = 1e-3  # default of the bias update: DeepSeek-V3's
NONE = "no routers are found in this model"
SETTINGS = ("aux_loss", "z_loss", "bias_update")


@dataclass(frozen=True)
class Chosen:
    """Coefficients of the losses and rate of the bias update (0: none), and why, by setting."""

    aux_loss: float
    z_loss: float
    bias_update: float
    why: dict[str, str] = field(default_factory=dict)


def choose(run: Run, routers: Routers | None, model: nn.Module) -> Chosen:
    """Resolves settings left on auto, and refuses what this model (with its method) cannot have."""
    why: dict[str, str] = {}
    aux = _aux_loss(run, routers, why)
    z = run.router.z_loss
    if z == "auto":
        z = 0.0
    elif z and (routers is None or not routers.sites):
        raise UserError("router.z_loss", z, NONE, "leave it out")
    if run.router.balance != "document" and not aux:
        problem = "is for the auxiliary loss, and there is none"
        remedy = "set router.aux_loss, or leave it out"
        raise UserError("advanced.router.balance", run.router.balance, problem, remedy)
    return Chosen(aux, z, _bias_update(run, routers, model, why), why)


def resolve_routers(result: Resolution, source: ModelSource, model: nn.Module) -> None:
    """Stores the chosen values in the run, with the reasons."""
    settings = result.run.router
    chosen = choose(result.run, routers_of(source, model), model)
    for name in SETTINGS:
        if getattr(settings, name) == "auto":
            result.put(f"router.{name}", getattr(chosen, name), chosen.why.get(name))


def chosen_in(run: Run, reasons: Mapping[str, str]) -> Chosen:
    """The choices that `resolve_routers` stored in a run."""
    settings: Any = run.router
    why = {name: reasons[f"router.{name}"] for name in SETTINGS if f"router.{name}" in reasons}
    return Chosen(settings.aux_loss, settings.z_loss, settings.bias_update, why)


def _aux_loss(run: Run, routers: Routers | None, why: dict[str, str]) -> float:
    wanted = run.router.aux_loss
    if wanted != "auto":
        if wanted and (routers is None or not routers.sites):
            raise UserError("router.aux_loss", wanted, NONE, "leave it out")
        if wanted and routers is not None and not routers.top_k:
            problem = "how many experts its tokens choose is not seen in its calls"
            remedy = "leave it out, or use router.z_loss"
            raise UserError("router.aux_loss", wanted, problem, remedy)
        return wanted
    if routers is None:
        return 0.0
    if not routers.enabled:
        if routers.coefficient is not None or routers.trouble:
            why["aux_loss"] = f"the model's config does not ask for it ({FLAG}: false)"
        return 0.0
    reason = f"the model's config asks for it ({FLAG}: true)"
    if routers.trouble:
        problem = f"{reason}, but it cannot be had: {routers.trouble}"
        remedy = "set router.aux_loss: 0 to train without it"
        if routers.sites and routers.top_k:
            remedy += "; a number adds the Switch Transformer's"
        raise UserError("router.aux_loss", "auto", problem, remedy)
    if routers.coefficient is None:
        says = f"the model's config says {FLAG}: true"
        why["aux_loss"] = f"{says}, but its own code adds no loss for it"
        return 0.0
    why["aux_loss"] = reason
    return routers.coefficient


def _bias_update(run: Run, routers: Routers | None, model: nn.Module, why: dict[str, str]) -> float:
    wanted = run.router.bias_update
    biases = routers.biases if routers is not None else {}
    if wanted != "auto":
        if wanted and not biases:
            problem = "this model has no bias that decides which experts are chosen"
            remedy = "leave it out, or use router.aux_loss"
            raise UserError("router.bias_update", wanted, problem, remedy)
        return wanted
    if not biases:
        return 0.0
    if run.method.type != "full" or not trains_routers(model, routers):
        why["bias_update"] = "the routers are frozen"
        return 0.0
    if run.diloco is not None:
        why["bias_update"] = "workers that train apart average parameters alone"
        return 0.0
    why["bias_update"] = "the model balances its routers by a bias"
    return RATE


def trains_routers(model: nn.Module, routers: Routers | None) -> bool:
    """Whether any parameter of a router (adapters aside) is trained."""
    if routers is None:
        return False
    for module in routers.modules(model):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not is_added(name):
                return True
    return False


def describe_choice(chosen: Chosen, balance: str) -> str:
    """The choice in one line; empty if there is nothing to report."""
    over = "each document" if balance == "document" else "each micro-batch"
    parts = []
    if chosen.aux_loss or "aux_loss" in chosen.why:
        what = "no auxiliary loss"
        if chosen.aux_loss:
            what = f"auxiliary loss × {chosen.aux_loss:g} over {over}"
        parts.append(what + _because(chosen, "aux_loss"))
    if chosen.z_loss:
        parts.append(f"z-loss × {chosen.z_loss:g}")
    if chosen.bias_update or "bias_update" in chosen.why:
        what = "bias stays as it is"
        if chosen.bias_update:
            what = f"bias moves by {chosen.bias_update:g} a step"
        parts.append(what + _because(chosen, "bias_update"))
    return "; ".join(parts)


def _because(chosen: Chosen, name: str) -> str:
    return f" ({chosen.why[name]})" if name in chosen.why else ""
