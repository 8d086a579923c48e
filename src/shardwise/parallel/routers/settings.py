"""From the settings to coefficients and rates: what the model's config asks for, where a run leaves it open."""

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

RATE = 1e-3  # of the bias, where it is left open: DeepSeek-V3's
NONE = "no routers are found in this model"
SETTINGS = ("aux_loss", "z_loss", "bias_update")


@dataclass(frozen=True)
class Chosen:
    """Coefficients of the losses and the rate of the bias, 0 where there is none, and why, by setting."""

    aux_loss: float
    z_loss: float
    bias_update: float
    why: dict[str, str] = field(default_factory=dict)


def choose(run: Run, found: Routers | None, model: nn.Module) -> Chosen:
    """Answers what is left open, and refuses what this model cannot have; the method has been applied to the model."""
    why: dict[str, str] = {}
    aux = _aux_loss(run, found, why)
    z = run.router.z_loss
    if z == "auto":
        z = 0.0
    elif z and (found is None or not found.sites):
        raise UserError("router.z_loss", z, NONE, "leave it out")
    if run.router.balance != "document" and not aux:
        problem = "is for the auxiliary loss, and there is none"
        raise UserError(
            "advanced.router.balance",
            run.router.balance,
            problem,
            "set router.aux_loss, or leave it out",
        )
    return Chosen(aux, z, _bias_update(run, found, model, why), why)


def resolve_routers(result: Resolution, source: ModelSource, model: nn.Module) -> None:
    """Puts what is chosen into the run, with its reasons."""
    settings, chosen = result.run.router, choose(result.run, routers_of(source, model), model)
    for name in SETTINGS:
        if getattr(settings, name) == "auto":
            result.put(f"router.{name}", getattr(chosen, name), chosen.why.get(name))


def chosen_in(run: Run, reasons: Mapping[str, str]) -> Chosen:
    """What was put there."""
    settings: Any = run.router
    why = {name: reasons[f"router.{name}"] for name in SETTINGS if f"router.{name}" in reasons}
    return Chosen(settings.aux_loss, settings.z_loss, settings.bias_update, why)


def _aux_loss(run: Run, found: Routers | None, why: dict[str, str]) -> float:
    wanted = run.router.aux_loss
    if wanted != "auto":
        if wanted and (found is None or not found.sites):
            raise UserError("router.aux_loss", wanted, NONE, "leave it out")
        if wanted and found is not None and not found.top_k:
            problem = "how many experts its tokens choose is not seen in its calls"
            raise UserError(
                "router.aux_loss", wanted, problem, "leave it out, or use router.z_loss"
            )
        return wanted
    if found is None:
        return 0.0
    if not found.asked:
        if found.coefficient is not None or found.trouble:
            why["aux_loss"] = f"the model's config does not ask for it ({FLAG}: false)"
        return 0.0
    if found.trouble:
        problem = (
            f"the model's config asks for it ({FLAG}: true), but it cannot be had: {found.trouble}"
        )
        number = "; a number adds the Switch Transformer's" if found.sites and found.top_k else ""
        raise UserError(
            "router.aux_loss",
            "auto",
            problem,
            f"set router.aux_loss: 0 to train without it{number}",
        )
    if found.coefficient is None:
        why["aux_loss"] = (
            f"the model's config says {FLAG}: true, but its own code adds no loss for it"
        )
        return 0.0
    why["aux_loss"] = f"the model's config asks for it ({FLAG}: true)"
    return found.coefficient


def _bias_update(run: Run, found: Routers | None, model: nn.Module, why: dict[str, str]) -> float:
    wanted, biases = run.router.bias_update, found.biases if found is not None else {}
    adapters = run.method.type != "full"
    if wanted != "auto":
        if wanted and not biases:
            problem = "this model has no bias that decides which experts are chosen"
            raise UserError(
                "router.bias_update", wanted, problem, "leave it out, or use router.aux_loss"
            )
        return wanted
    if not biases:
        return 0.0
    if adapters or not trains_routers(model, found):
        why["bias_update"] = "the routers are frozen"
        return 0.0
    if run.diloco is not None:
        why["bias_update"] = "workers that train apart average parameters alone"
        return 0.0
    why["bias_update"] = "the model balances its routers by a bias"
    return RATE


def trains_routers(model: nn.Module, found: Routers | None) -> bool:
    """Whether any parameter of a router itself is trained."""
    modules: dict[Any, Any] = {} if found is None else found.modules(model)
    return any(p.requires_grad for m in modules for n, p in m.named_parameters() if not is_added(n))


def told(chosen: Chosen, balance: str) -> str:
    """The choice in one line; empty where there is nothing to tell."""
    over = "each document" if balance == "document" else "each micro-batch"
    said = []
    if chosen.aux_loss or "aux_loss" in chosen.why:
        what = (
            f"auxiliary loss × {chosen.aux_loss:g} over {over}"
            if chosen.aux_loss
            else "no auxiliary loss"
        )
        said.append(what + _because(chosen, "aux_loss"))
    if chosen.z_loss:
        said.append(f"z-loss × {chosen.z_loss:g}")
    if chosen.bias_update or "bias_update" in chosen.why:
        what = (
            f"bias moves by {chosen.bias_update:g} a step"
            if chosen.bias_update
            else "bias stays as it is"
        )
        said.append(what + _because(chosen, "bias_update"))
    return "; ".join(said)


def _because(chosen: Chosen, name: str) -> str:
    return f" ({chosen.why[name]})" if name in chosen.why else ""
