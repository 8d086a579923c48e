"""Applies a run's `method` and `freeze` to a model: adapters are attached, the rest is frozen and stored in few bytes.

[Note: where parameters live] Trained parameters are fp32 masters that FSDP gathers in the compute dtype. Frozen ones
are stored in the compute dtype: they are never updated, so nothing is lost by it. At stages 0–2, where every rank has
all working weights anyway, frozen ones are plain tensors that FSDP does not manage (parallel/zero/stages.py): one copy,
and they are never communicated. At stage 3 they are sharded and gathered with their block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.config.methods import Full, Lora, Qlora
from shardwise.config.resolve import task_wanted
from shardwise.core.dtypes import COMPUTE
from shardwise.core.errors import UserError
from shardwise.nn.adapters.layers import features, is_added
from shardwise.nn.adapters.plan import AdapterPlan, attach, plan_method
from shardwise.nn.adapters.quantized import quantize_linears
from shardwise.nn.adapters.targets import find_parameters, inside, uncovered
from shardwise.nn.models.build import store_in
from shardwise.nn.models.weights import new_parameters

if TYPE_CHECKING:
    from shardwise.config.schema import Run


@dataclass(frozen=True)
class Adapted:
    """Result of applying a method to a model."""

    parameters: int  # of the base
    trainable: int
    frozen: int  # parameters of the base that are not trained
    frozen_bytes: int  # what those take as they are stored
    plan: AdapterPlan | None  # None where no adapter is put on
    left_out: tuple[str, ...]  # matrices that adapters do not cover
    kept: frozenset[str] | None  # tensors that a checkpoint must hold; None = all

    @property
    def share(self) -> float:
        """Share of the parameters that are trained."""
        return self.trainable / (self.trainable + self.frozen)


def apply_method(model: Any, run: Run, weights: Path | None = None) -> Adapted:
    """Attaches the adapters, freezes the rest, and stores it in the compute dtype; the model may be on `meta`.

    What the base's files, in `weights`, lack is new: adapters alone would leave it random, so it is trained in full.
    """
    method = run.method
    parameters = _count(model)
    plan: AdapterPlan | None = None
    left_out: tuple[str, ...] = ()
    if not isinstance(method, Full):
        plan = plan_method(model, method, _new(model, run, weights))
        left_out = uncovered(model, [*plan.targets, *plan.fully_trained]) if isinstance(method, Lora) else ()
        shapes = {name: features(model.get_submodule(name)) for name in plan.targets}
        if isinstance(method, Qlora):
            fully_trained = plan.fully_trained
            quantize_linears(model, lambda name, _: not inside(name, fully_trained), method.bits, method.double_quant)
        model.requires_grad_(False)
        attach(model, plan, shapes)
        for name in plan.fully_trained:
            model.get_submodule(name).requires_grad_(True)
    _freeze(model, run)
    store_in(model, COMPUTE[run.precision], frozen_only=True)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    added = sum(p.numel() for n, p in model.named_parameters() if is_added(n))
    frozen_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    return Adapted(
        parameters, trainable, parameters - trainable + added, frozen_bytes, plan, left_out, _kept(model, run)
    )


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _freeze(model: nn.Module, run: Run) -> None:
    if not run.freeze:
        return
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = find_parameters(trained, run.freeze, "freeze")
    if len(names) == len(trained):
        raise UserError("freeze", list(run.freeze), "leaves nothing to train", "name fewer parameters")
    for name in names:
        trained[name].requires_grad_(False)


def _new(model: Any, run: Run, weights: Path | None) -> tuple[str, ...]:
    """Modules with parameters that no file has, and for classification everything on top of the body."""
    names = [n.rpartition(".")[0] for n in new_parameters(model, weights)] if weights is not None else []
    if task_wanted(run) == "classify":
        body = model.base_model_prefix
        names += [n for n, m in model.named_children() if n != body and any(True for _ in m.parameters())]
    return tuple(n for n in dict.fromkeys(names) if not inside(n.rpartition(".")[0], names))


def _kept(model: nn.Module, run: Run) -> frozenset[str] | None:
    """If the base has files, what is trained; for an adapter run under each of its names (PEFT needs them all)."""
    if run.model.name is None or (isinstance(run.method, Full) and not run.freeze):
        return None
    adapter = not isinstance(run.method, Full)
    names = {n for n, p in model.named_parameters(remove_duplicate=not adapter) if p.requires_grad}
    return frozenset(names if adapter else names | {n for n, _ in model.named_buffers()})
