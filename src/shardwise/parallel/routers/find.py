"""Finds the routers of a class of models and its auxiliary loss, by running a tiny model.

A tiny model of the class, with as many experts as the real one, computes its own loss by
transformers' code, one document at a time. If our sums (losses.py) over several documents at once
give the same loss and gradients, they are used. If not, or if transformers' code fails, the reason
is stored, and reported when that loss is requested.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.config.objectives import Task
from shardwise.core.compat.torch_private import tree_leaves
from shardwise.data.loader import MicroBatch
from shardwise.nn.models.build import FLAG, find_blocks
from shardwise.nn.models.source import ModelSource
from shardwise.nn.objective import Loss
from shardwise.nn.tiny.case import LossAndGradients, TinyCase, case_of, gradients_of, judge
from shardwise.nn.tiny.shrink import ROUTING, shrink
from shardwise.parallel.expert.apply import find_experts
from shardwise.parallel.expert.modules import RoutedExperts, experts_in, style_of
from shardwise.parallel.routers.hooks import RouterLosses
from shardwise.parallel.routers.losses import RouterLossWeights, losses_of, sums_of
from shardwise.parallel.tensor.roles import pattern_of

ROWS = 3
WIDTH = 12
TOLERANCE = 1e-4  # relative to the loss: sums are in fp32, like transformers'
LARGE = 1e4  # a bias that leaves no choice
CLASS_NAMES = ("router", "expert", "moe")


@dataclass(frozen=True)
class RouterModules:
    """Modules whose output (item `index`, if not None) is router logits, counted `times` times."""

    kind: str
    pattern: str
    index: int | None
    times: int = 1

    def holds(self, name: str, module: nn.Module) -> bool:
        """Whether a module is one of them; its class may have become a subclass of `kind`."""
        return pattern_of(name) == self.pattern and any(
            c.__name__ == self.kind for c in type(module).__mro__
        )


@dataclass(frozen=True)
class Routers:
    """The routers of a class of models.

    `coefficient`: of its auxiliary loss (None: its code has none); `enabled`: whether its config
    enables that loss; `trouble`: why the loss cannot be computed. `biases`: of auxiliary-loss-free
    balancing, by the experts that each one is for, both as name patterns.
    """

    sites: tuple[RouterModules, ...]
    top_k: int
    coefficient: float | None
    enabled: bool
    trouble: str
    biases: Mapping[str, str]

    def modules(self, model: nn.Module) -> dict[nn.Module, RouterModules]:
        """The routers of a model of this class."""
        sites: dict[nn.Module, RouterModules] = {}
        for name, module in model.named_modules():
            for site in self.sites:
                if site.holds(name, module):
                    sites[module] = site
        return sites


_CACHE: dict[tuple[type, str, str], Routers | None] = {}


def routers_of(source: ModelSource, model: nn.Module) -> Routers | None:
    """The routers of a model, cached by class and config; None for a dense model, at no cost."""
    kinds = {type(module).__name__.lower() for module in model.modules()}
    if not any(word in kind for kind in kinds for word in CLASS_NAMES):
        return None
    settings = json.dumps(source.config.to_dict(), default=str, sort_keys=True)
    key = (type(source.config), settings, source.task)
    if key not in _CACHE:
        _CACHE.clear()  # only the latest model's are cached
        _CACHE[key] = find_routers(source.config, source.task)
    return _CACHE[key]


def find_routers(config: Any, task: Task) -> Routers | None:
    """The routers of a config's class, from a tiny model; None if it routes no tokens."""
    case = case_of(shrink(config, keep=ROUTING), task)
    model = case.model()
    for stack in find_experts(model).values():
        stack.requires_grad_(False)  # many parameters, which are not compared
    enabled = bool(getattr(config, FLAG, False) or getattr(config.get_text_config(), FLAG, False))
    if config.is_encoder_decoder:
        trouble = "those of encoder–decoder models are not supported"
        return Routers((), 0, None, enabled, trouble, {}) if hasattr(config, FLAG) else None
    own = _own_loss(model, case)
    sites = own.sites or _beside_experts(model, case)
    chosen = _chosen_experts(model, case)
    if not sites and not chosen and not own.trouble and own.coefficient is None:
        return None
    top_k = own.top_k or max((experts.shape[-1] for experts in chosen.values()), default=0)
    trouble = own.trouble
    if own.sites and not trouble and own.coefficient is not None:
        routers = Routers(tuple(own.sites), own.top_k, own.coefficient, True, "", {})
        trouble = _difference(model, case, routers)
    return Routers(tuple(sites), top_k, own.coefficient, enabled, trouble, _biases(model, case))


@dataclass
class _OwnLoss:
    """The auxiliary loss of a model's own forward."""

    sites: list[RouterModules]
    top_k: int = 0
    coefficient: float | None = None
    trouble: str = ""


class _Call(NamedTuple):
    """A module's call: the tensors of its output, by index (None if it is not a tuple)."""

    name: str
    module: nn.Module
    tensors: list[tuple[int | None, torch.Tensor]]


@contextmanager
def _recorded_calls(model: nn.Module) -> Iterator[list[_Call]]:
    """The calls of all modules while the context is open, inner modules first."""
    calls: list[_Call] = []
    handles = []
    for name, module in model.named_modules():

        def record(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            outputs: list[tuple[int | None, Any]] = [(None, output)]
            if isinstance(output, (tuple, list)):
                outputs = list(enumerate(output))
            tensors = [(i, x) for i, x in outputs if isinstance(x, torch.Tensor)]
            calls.append(_Call(name, module, tensors))

        handles.append(module.register_forward_hook(record))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _row(case: TinyCase, row: int) -> dict[str, torch.Tensor]:
    return {name: value[row : row + 1] for name, value in case.inputs(ROWS, WIDTH).items()}


def _own_loss(model: Any, case: TinyCase) -> _OwnLoss:
    row = _row(case, 0)
    labels = row.get("decoder_input_ids", row["input_ids"]).clone()
    if case.task == "classify":
        labels = labels[:, 0] * 0
    with _recorded_calls(model) as calls:
        try:
            out = model(input_ids=row["input_ids"], labels=labels, **{FLAG: True})
        except Exception as error:
            if isinstance(error, TypeError) and FLAG in str(error):
                return _OwnLoss([])
            return _OwnLoss([], trouble=_failure(error))
    losses = {key: value for key, value in out.items() if "aux_loss" in key or "z_loss" in key}
    logits = [x for x in tree_leaves(out.get("router_logits")) if isinstance(x, torch.Tensor)]
    own = _OwnLoss(_sites_of(logits, calls))
    aux = losses.pop("aux_loss", None)
    if any(isinstance(value, torch.Tensor) for value in losses.values()):
        own.trouble = f"its own code has losses of another form ({', '.join(losses)})"
    if isinstance(aux, torch.Tensor) and aux.requires_grad:
        (slope,) = torch.autograd.grad(out.loss, aux, allow_unused=True)
        # Rounded from fp32 to the number in the config.
        own.coefficient = 0.0 if slope is None else float(f"{float(slope):.6g}")
        own.top_k = _top_k(own.sites, logits, aux)
        if not own.top_k:
            own.trouble = "its own code computes it by a formula of its own"
    return own


def _failure(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"transformers' own code fails to compute it ({type(error).__name__}: {text})"


def _sites_of(logits: list[torch.Tensor], calls: list[_Call]) -> list[RouterModules]:
    """The innermost modules that returned these logits; empty if there is none for some."""
    sites: dict[tuple[str, str], RouterModules] = {}
    counts: dict[str, int] = {}
    for table in logits:
        source = _source_of(table, calls)
        if source is None:
            return []
        call, index = source
        counts[call.name] = counts.get(call.name, 0) + 1
        kind = type(call.module).__name__
        pattern = pattern_of(call.name)
        sites[kind, pattern] = RouterModules(kind, pattern, index, counts[call.name])
    return list(sites.values())


def _source_of(tensor: torch.Tensor, calls: list[_Call]) -> tuple[_Call, int | None] | None:
    """The first call that returned a tensor, and the tensor's index in the output."""
    for call in calls:
        for index, output in call.tensors:
            if output is tensor:
                return call, index
    return None


def _top_k(sites: list[RouterModules], logits: list[torch.Tensor], wanted: torch.Tensor) -> int:
    """The number of experts per token with which our formula gives the loss; 0 if none does."""
    if not sites or any(table.ndim < 2 for table in logits):
        return 0
    tables = [table.detach().flatten(0, -2) for table in logits]
    wanted = wanted.detach()
    weights = torch.tensor([1.0, 0.0])
    for top_k in range(1, min(table.shape[-1] for table in tables) + 1):
        terms = RouterLossWeights(1.0, 0.0, top_k)
        sums: Any = 0
        try:
            for table in tables:
                sums = sums + sums_of(table, torch.zeros(len(table)).long(), weights, terms)
        except RuntimeError:
            return 0  # layers with different numbers of experts
        if abs(losses_of(sums, weights, terms)["aux_loss"] - wanted) <= TOLERANCE * abs(wanted):
            return top_k
    return 0


def _difference(model: Any, case: TinyCase, routers: Routers) -> str:
    """How our loss of all rows at once differs from its own of each row; empty if it does not."""
    ids = case.inputs(ROWS, WIDTH)["input_ids"]
    own = sum(model(input_ids=row, **{FLAG: True}).aux_loss for row in ids.split(1)) / ROWS
    wanted = _loss_and_gradients(model, own)
    losses = RouterLosses(routers.modules(model), RouterLossWeights(1.0, 0.0, routers.top_k))
    losses.begin(MicroBatch(ids, ids.clone(), None, None))
    model(input_ids=ids, use_cache=False, **{FLAG: False})
    zero = torch.zeros((), dtype=torch.float64)
    total = losses.finish(Loss(zero, zero[None], zero[None]), "").total / (ROWS * WIDTH)
    losses.remove()
    verdict = judge(_loss_and_gradients(model, total), wanted)
    close = verdict.loss <= TOLERANCE * max(1.0, abs(wanted.loss))
    if close and verdict.gradient <= TOLERANCE * 10:
        return ""
    what = f"the gradient of {verdict.module}" if verdict.loss <= TOLERANCE else "its value"
    return f"its own code computes something else ({what} differs)"


def _loss_and_gradients(model: nn.Module, loss: Any) -> LossAndGradients:
    model.zero_grad()
    if loss.requires_grad:
        loss.backward()
    result = LossAndGradients(float(loss.detach()), gradients_of(model))
    model.zero_grad()
    return result


def _beside_experts(model: nn.Module, case: TinyCase) -> list[RouterModules]:
    """Routers of models that publish no router logits: modules next to a stack of experts.

    The site is the first call there with an output of one value per expert; none if several fit.
    """
    stacks = find_experts(model)
    with _recorded_calls(model) as calls, torch.no_grad():
        model(**case.inputs(ROWS, WIDTH), use_cache=False)  # type: ignore[operator]
    sites: dict[tuple[str, str], RouterModules] = {}
    blocks = {name for name, _ in find_blocks(model)}
    for stack, module in stacks.items():
        parent = stack.rpartition(".")[0]
        for around in (parent, parent.rpartition(".")[0]):
            if around in blocks:
                break
            beside = [
                call
                for call in calls
                if call.name.startswith(f"{around}.") and not call.name.startswith(stack)
            ]
            router, indices = _first_with_logits(beside, experts_in(module))
            if router is None:
                continue
            if len(indices) == 1:
                kind = type(router.module).__name__
                pattern = pattern_of(router.name)
                sites[kind, pattern] = RouterModules(kind, pattern, indices[0])
            break
    return list(sites.values())


def _first_with_logits(calls: list[_Call], experts: int) -> tuple[_Call | None, list[int | None]]:
    """The first call with outputs that may be router logits, and the indices of those outputs."""
    for call in calls:
        indices = [i for i, x in call.tensors if _are_logits(x, ROWS * WIDTH, experts)]
        if indices:
            return call, indices
    return None, []


def _are_logits(x: torch.Tensor, tokens: int, experts: int) -> bool:
    """Whether a tensor has a value for each token and expert, and not only probabilities."""
    if not x.is_floating_point() or x.ndim < 2:
        return False
    if x.shape[-1] != experts or x.numel() != tokens * experts:
        return False
    return bool((x < 0).any() or (x > 1).any())


@torch.no_grad()
def _chosen_experts(model: nn.Module, case: TinyCase) -> dict[str, torch.Tensor]:
    """The experts of each token, by stack, for stacks that are called with them."""
    chosen: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in find_experts(model).items():
        if style_of(module) is RoutedExperts:

            def record(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                chosen[name] = [*args, *kwargs.values()][1].detach().clone()

            handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        model(**case.inputs(ROWS, WIDTH), use_cache=False)  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()
    return chosen


def _biases(model: Any, case: TinyCase) -> dict[str, str]:
    """Vectors that decide nothing but which experts are chosen, by stack: they get no gradient."""
    biases: dict[str, str] = {}
    for stack, chosen in _chosen_experts(model, case).items():
        if pattern_of(stack) in biases:
            continue
        parent, _, stack_name = stack.rpartition(".")
        experts = experts_in(model.get_submodule(stack))
        router = model.get_submodule(parent)
        tensors = dict(router.named_parameters()) | dict(router.named_buffers())
        for name, tensor in tensors.items():
            if tensor.numel() != experts or not tensor.is_floating_point():
                continue
            if name.startswith(stack_name):
                continue
            decides = _decides(model, case, stack, tensor, chosen)
            if decides and not _has_gradient(model, case, tensor):
                biases[pattern_of(stack)] = pattern_of(f"{parent}.{name}")
    return biases


@torch.no_grad()
def _decides(
    model: Any, case: TinyCase, stack: str, tensor: torch.Tensor, before: torch.Tensor
) -> bool:
    """Whether a large value at an expert's index makes every token choose that expert."""
    flat = tensor.data.view(-1)
    expert = int(torch.bincount(before.flatten(), minlength=tensor.numel()).argmin())
    original = flat[expert].clone()
    flat[expert] += LARGE
    after = _chosen_experts(model, case)[stack]
    flat[expert] = original
    return bool((after == expert).any(-1).all())


def _has_gradient(model: Any, case: TinyCase, tensor: torch.Tensor) -> bool:
    before = tensor.requires_grad
    tensor.requires_grad_(True)
    try:
        logits = model(**case.inputs(ROWS, WIDTH), use_cache=False).logits
        (slope,) = torch.autograd.grad(logits.square().mean(), tensor, allow_unused=True)
    finally:
        tensor.requires_grad_(before)
    return slope is not None and bool(slope.any())
