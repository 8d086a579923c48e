"""What an adapter consists of, module by module: made from settings or from a PEFT folder, and attached to a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.config.methods import Ia3, Lora
from shardwise.core.errors import UserError
from shardwise.nn.adapters.layers import attach_ia3, attach_lora, features
from shardwise.nn.adapters.peft import PeftAdapter, read_adapter
from shardwise.nn.adapters.targets import (
    find_modules,
    find_targets,
    ia3_targets,
    inside,
    linear_modules,
    matches,
    with_tied,
)


@dataclass(frozen=True)
class AdapterPlan:
    """Ranks and alphas of low-rank updates, or which factors scale inputs, by module; and modules trained in full."""

    kind: str  # lora or ia3
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    feedforward: dict[str, bool] = field(default_factory=dict)
    fully_trained: tuple[str, ...] = ()

    @property
    def targets(self) -> list[str]:
        """The adapted modules, in the model's order."""
        return list(self.ranks or self.feedforward)

    def scale(self, name: str) -> float:
        """Returns the factor of a module's update."""
        rank = self.ranks[name]
        return self.alphas[name] / (math.sqrt(rank) if self.rslora else rank)


def plan_method(model: nn.Module, method: Lora | Ia3, head: tuple[str, ...] = ()) -> AdapterPlan:
    """Returns the plan of the settings on this model; `head` names new modules, which are always trained in full."""
    if method.adapter is not None:
        return _continued(model, method, head)
    also = find_modules(model, method.modules_to_save, "method.modules_to_save") if method.modules_to_save else []
    fully_trained = with_tied(model, [*head, *also])
    if isinstance(method, Ia3):
        chosen = ia3_targets(model, method.target_modules, method.feedforward_modules)
        return AdapterPlan(
            "ia3",
            feedforward={n: ff for n, ff in chosen.items() if not inside(n, fully_trained)},
            fully_trained=fully_trained,
        )
    names = [name for name in _lora_targets(model, method) if not inside(name, fully_trained)]
    ranks = {name: _rank(method, name) for name in names}
    for pattern in method.rank_pattern:
        if not any(matches(name, pattern) for name in names):
            problem = "matches none of the modules that are adapted"
            raise UserError("method.rank_pattern", pattern, problem, f"name some of them, e.g. {names[0]}")
    alphas = dict.fromkeys(names, float(method.scaled))
    return AdapterPlan(
        "lora", ranks, alphas, method.rslora, method.dora, float(method.dropout), fully_trained=fully_trained
    )


def _lora_targets(model: nn.Module, method: Lora) -> list[str]:
    if method.target_modules != "linear":
        return find_targets(model, method.target_modules, "method.target_modules")
    if layers := list(linear_modules(model)):
        return layers
    problem = "this model has no linear layers besides its head"
    raise UserError("method.target_modules", "linear", problem, "use method: full, with freeze for what should stay")


def _rank(method: Lora, name: str) -> int:
    """The last matching pattern decides, so that exceptions follow rules."""
    return next(
        (rank for pattern, rank in reversed(method.rank_pattern.items()) if matches(name, pattern)), method.rank
    )


def plan_folder(model: nn.Module, folder: Path, field: str = "adapter") -> tuple[AdapterPlan, PeftAdapter]:
    """Returns the adapter of a PEFT folder, checked against the model it is for."""
    adapter = read_adapter(folder, field)
    modules = dict(model.named_modules())
    for name in [*adapter.ranks, *adapter.feedforward, *adapter.fully_trained]:
        if name not in modules:
            problem = f"it adapts {name}, which this model does not have"
            raise UserError(field, str(folder), problem, "use the model that the adapter was trained on")
    for name, shape in adapter.shapes.items():
        if name in modules and shape != features(modules[name]):
            own_shape = features(modules[name])
            problem = f"{name} maps {shape[0]} to {shape[1]} there, {own_shape[0]} to {own_shape[1]} here"
            raise UserError(field, str(folder), problem, "use the model that the adapter was trained on")
    return plan_of(adapter), adapter


def plan_of(adapter: PeftAdapter) -> AdapterPlan:
    """Returns the plan that a folder or a checkpoint describes."""
    return AdapterPlan(
        adapter.kind,
        adapter.ranks,
        adapter.alphas,
        adapter.rslora,
        adapter.dora,
        adapter.dropout,
        adapter.feedforward,
        adapter.fully_trained,
    )


def _continued(model: nn.Module, method: Lora | Ia3, head: tuple[str, ...]) -> AdapterPlan:
    """The adapter that training resumes from; settings changed from their defaults must agree with it."""
    assert method.adapter is not None
    plan, adapter = plan_folder(model, Path(method.adapter).expanduser(), "method.adapter")
    kind = "ia3" if isinstance(method, Ia3) else "lora"
    _agree(method.adapter, "type", method.type, kind, plan.kind)
    changed_keys = {key for key, f in type(method).model_fields.items() if getattr(method, key) != f.default}
    requested = plan_method(model, method.model_copy(update={"adapter": None}), head)
    for key, requested_value, existing in _differences(requested, plan, adapter):
        if key in changed_keys:
            _agree(method.adapter, key, getattr(method, key), requested_value, existing)
    return replace(plan, dropout=requested.dropout or plan.dropout)


def _differences(requested: AdapterPlan, plan: AdapterPlan, adapter: PeftAdapter) -> list[tuple[str, Any, Any]]:
    ranks = {n: r for n, r in requested.ranks.items() if n in plan.ranks}
    alphas = {n: a for n, a in requested.alphas.items() if n in plan.alphas}
    return [
        ("target_modules", set(requested.targets), set(plan.targets)),
        ("feedforward_modules", requested.feedforward, plan.feedforward),
        ("rank", ranks, {n: plan.ranks[n] for n in ranks}),
        ("rank_pattern", ranks, {n: plan.ranks[n] for n in ranks}),
        ("alpha", alphas, {n: plan.alphas[n] for n in alphas}),
        ("rslora", requested.rslora, plan.rslora),
        ("dora", requested.dora, plan.dora),
        ("modules_to_save", set(requested.fully_trained), set(plan.fully_trained)),
    ]


def _agree(adapter: str, key: str, value: Any, requested_value: Any, existing: Any) -> None:
    if requested_value != existing:
        existing_text = sorted(set(existing.values())) if isinstance(existing, dict) else existing
        existing_text = sorted(existing_text)[:6] if isinstance(existing_text, set) else existing_text
        existing_text = ", ".join(map(str, existing_text)) if isinstance(existing_text, list) else existing_text
        problem = f"the adapter {adapter} has {existing_text} instead"
        raise UserError(f"method.{key}", value, problem, "leave it out: it comes with the adapter")


def attach(model: nn.Module, plan: AdapterPlan, shapes: dict[str, tuple[int, int]] | None = None) -> None:
    """Attaches a plan's layers to a model; `shapes` if the weights no longer tell them (a quantised base)."""
    for name in plan.targets:
        module = model.get_submodule(name)
        shape = (shapes or {}).get(name) or features(module)
        if plan.kind == "lora":
            attach_lora(module, shape, plan.ranks[name], plan.scale(name), plan.dropout, plan.dora)
        else:
            attach_ia3(module, shape, plan.feedforward[name])
