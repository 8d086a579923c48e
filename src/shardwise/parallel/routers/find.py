"""Where a class of models has its routers, and what its own loss makes of them: found by running a tiny one.

A tiny model of the class with as many experts as the real one is asked for its own loss by transformers' own code, a
document at a time. Where our sums (losses.py) over several documents at once come to the same loss and gradients, they
are used; where they do not, or its own code fails, the reason is kept for whoever asks for that loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from shardwise.parallel.routers.losses import Terms, losses_of, sums_of
from shardwise.parallel.tensor.roles import pattern_of

ROWS, WIDTH = 3, 12
NEAR = 1e-4  # of the loss: sums are in fp32, as transformers' own are
LARGE = 1e4  # a bias that leaves no choice
WORDS = ("router", "expert", "moe")


@dataclass(frozen=True)
class Site:
    """Modules whose output (or one of them, by its index) are router logits; the model's loss counts them `times`."""

    kind: str
    pattern: str
    index: int | None
    times: int = 1

    def holds(self, name: str, module: nn.Module) -> bool:
        """Whether a module is one of them, also where another class has been put in front of its own."""
        return pattern_of(name) == self.pattern and any(
            c.__name__ == self.kind for c in type(module).__mro__
        )


@dataclass(frozen=True)
class Routers:
    """Of a class of models.

    `coefficient`: of its own auxiliary loss (None: its code has none); `asked`: whether its config switches it on;
    `trouble`: why that loss cannot be had. `biases`: of balancing without a loss, by the experts that each one is for,
    both as patterns of names.
    """

    sites: tuple[Site, ...]
    top_k: int
    coefficient: float | None
    asked: bool
    trouble: str
    biases: Mapping[str, str]

    def modules(self, model: nn.Module) -> dict[nn.Module, Site]:
        """The routers of a model of this class."""
        named = ((name, module) for name, module in model.named_modules())
        return {m: site for name, m in named for site in self.sites if site.holds(name, m)}


_FOUND: dict[tuple[type, str, str], Routers | None] = {}


def routers_of(source: ModelSource, model: nn.Module) -> Routers | None:
    """What is true of a model's class and config; None for a dense one, which costs nothing to tell."""
    kinds = {type(module).__name__.lower() for module in model.modules()}
    if not any(word in kind for kind in kinds for word in WORDS):
        return None
    key = (
        type(source.config),
        json.dumps(source.config.to_dict(), default=str, sort_keys=True),
        source.task,
    )
    if key not in _FOUND:
        _FOUND.clear()  # one model at a time is looked at
        _FOUND[key] = find_routers(source.config, source.task)
    return _FOUND[key]


def find_routers(config: Any, task: Task) -> Routers | None:
    """Runs a tiny model of a config's class; None where nothing in it routes tokens to experts."""
    case = case_of(shrink(config, keep=ROUTING), task)
    model = case.model()
    for stack in find_experts(model).values():
        stack.requires_grad_(False)  # many, and no part of what is compared
    asked = bool(getattr(config, FLAG, False) or getattr(config.get_text_config(), FLAG, False))
    if config.is_encoder_decoder:
        trouble = "those of encoder–decoder models are not supported"
        return Routers((), 0, None, asked, trouble, {}) if hasattr(config, FLAG) else None
    own = _own_loss(model, case)
    sites = own.sites or _beside_experts(model, case)
    calls = _choices(model, case)
    if not sites and not calls and not own.trouble and own.coefficient is None:
        return None
    trouble, top_k = own.trouble, own.top_k or max(calls.values(), default=0)
    if own.sites and not trouble and own.coefficient is not None:
        trouble = _differs(
            model, case, Routers(tuple(own.sites), own.top_k, own.coefficient, True, "", {})
        )
    return Routers(tuple(sites), top_k, own.coefficient, asked, trouble, _biases(model, case))


@dataclass
class _Own:
    """What a model's own forward tells of its auxiliary loss."""

    sites: list[Site]
    top_k: int = 0
    coefficient: float | None = None
    trouble: str = ""


@contextmanager
def _outputs(
    model: nn.Module,
) -> Iterator[list[tuple[str, nn.Module, list[tuple[int | None, torch.Tensor]]]]]:
    """Every module's tensors as they come out, in the order of the calls: inner modules first."""
    found: list[tuple[str, nn.Module, list[tuple[int | None, torch.Tensor]]]] = []
    handles = []
    for name, module in model.named_modules():

        def see(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            several = isinstance(output, (tuple, list))
            each: list[tuple[int | None, Any]] = (
                list(enumerate(output)) if several else [(None, output)]
            )
            found.append((name, module, [(i, x) for i, x in each if isinstance(x, torch.Tensor)]))

        handles.append(module.register_forward_hook(see))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _row(case: TinyCase, row: int) -> dict[str, torch.Tensor]:
    return {name: value[row : row + 1] for name, value in case.inputs(ROWS, WIDTH).items()}


def _own_loss(model: Any, case: TinyCase) -> _Own:
    given = _row(case, 0)
    labels = given["decoder_input_ids" if "decoder_input_ids" in given else "input_ids"].clone()
    given = {
        "input_ids": given["input_ids"],
        "labels": labels if case.task != "classify" else labels[:, 0] * 0,
    }
    with _outputs(model) as seen:
        try:
            out = model(**given, **{FLAG: True})
        except TypeError as error:
            if FLAG in str(error):
                return _Own([])
            return _Own([], trouble=_said(error))
        except Exception as error:
            return _Own([], trouble=_said(error))
    named = {key: value for key, value in out.items() if "aux_loss" in key or "z_loss" in key}
    logits = [one for one in tree_leaves(out.get("router_logits")) if isinstance(one, torch.Tensor)]
    own = _Own(_where(logits, seen))
    aux = named.pop("aux_loss", None)
    if any(isinstance(value, torch.Tensor) for value in named.values()):
        own.trouble = f"its own code has losses of another form ({', '.join(named)})"
    if isinstance(aux, torch.Tensor) and aux.requires_grad:
        (slope,) = torch.autograd.grad(out.loss, aux, allow_unused=True)
        # In fp32, to be read as the number that the config has.
        own.coefficient = 0.0 if slope is None else float(f"{float(slope):.6g}")
        own.top_k = _top_k(own.sites, logits, aux)
        if not own.top_k:
            own.trouble = "its own code computes it by a formula of its own"
    return own


def _said(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"transformers' own code fails to compute it ({type(error).__name__}: {text})"


def _where(logits: list[torch.Tensor], seen: list[Any]) -> list[Site]:
    """The modules that the recorded logits came out of, the innermost of each."""
    sites: dict[tuple[str, str], Site] = {}
    counts: dict[str, int] = {}
    for one in logits:
        name, module, index = next(
            ((n, m, i) for n, m, outputs in seen for i, x in outputs if x is one), ("", None, None)
        )
        if module is None:
            return []
        counts[name] = counts.get(name, 0) + 1
        kind = type(module).__name__
        sites[kind, pattern_of(name)] = Site(kind, pattern_of(name), index, counts[name])
    return list(sites.values())


def _top_k(sites: list[Site], logits: list[torch.Tensor], wanted: torch.Tensor) -> int:
    """How many experts of a token its own formula counts: the number that gives its own value; 0 if none does."""
    if not sites or any(one.ndim < 2 for one in logits):
        return 0
    rows = [one.detach().flatten(0, -2) for one in logits]
    weights = torch.tensor([1.0, 0.0])
    for top_k in range(1, min(one.shape[-1] for one in rows) + 1):
        terms = Terms(1.0, 0.0, top_k)
        try:
            sums = sum(
                sums_of(one, torch.zeros(len(one), dtype=torch.long), weights, terms)
                for one in rows
            )
        except RuntimeError:
            return 0  # layers with unlike numbers of experts
        assert isinstance(sums, torch.Tensor)
        if abs(losses_of(sums, weights, terms)["aux_loss"] - wanted.detach()) <= NEAR * abs(
            wanted.detach()
        ):
            return top_k
    return 0


def _differs(model: Any, case: TinyCase, found: Routers) -> str:
    """Why our sums over all rows at once are not its own loss of each row; empty if they are."""
    ids, terms = case.inputs(ROWS, WIDTH)["input_ids"], Terms(1.0, 0.0, found.top_k)
    wanted = _answer(
        model,
        sum(model(input_ids=ids[i : i + 1], **{FLAG: True}).aux_loss for i in range(ROWS)) / ROWS,
    )
    routers = RouterLosses(found.modules(model), terms)
    batch = MicroBatch(ids, ids.clone(), None, None)
    routers.begin(batch)
    model(input_ids=ids, use_cache=False, **{FLAG: False})
    nothing = torch.zeros((), dtype=torch.float64)
    total = routers.finish(Loss(nothing, nothing[None], nothing[None]), "").total / (ROWS * WIDTH)
    routers.remove()
    verdict = judge(_answer(model, total), wanted)
    if verdict.loss <= NEAR * max(1.0, abs(wanted.loss)) and verdict.gradient <= NEAR * 10:
        return ""
    what = f"the gradient of {verdict.module}" if verdict.loss <= NEAR else "its value"
    return f"its own code computes something else ({what} differs)"


def _answer(model: nn.Module, loss: Any) -> LossAndGradients:
    model.zero_grad()
    if loss.requires_grad:
        loss.backward()
    found = LossAndGradients(float(loss.detach()), gradients_of(model))
    model.zero_grad()
    return found


def _beside_experts(model: nn.Module, case: TinyCase) -> list[Site]:
    """Of models that publish no router logits: what first comes out beside a stack of experts with one value for each.

    None where that could be more than one thing.
    """
    stacks = find_experts(model)
    with _outputs(model) as seen, torch.no_grad():
        model(**case.inputs(ROWS, WIDTH), use_cache=False)  # type: ignore[operator]
    sites: dict[tuple[str, str], Site] = {}
    blocks = {name for name, _ in find_blocks(model)}
    for stack, module in stacks.items():
        parent = stack.rpartition(".")[0]
        for around in (parent, parent.rpartition(".")[0]):
            if around in blocks:
                break
            beside = [
                one
                for one in seen
                if one[0].startswith(f"{around}.") and not one[0].startswith(stack)
            ]
            fitting = (
                (
                    name,
                    router,
                    [i for i, x in outputs if _are_logits(x, ROWS * WIDTH, experts_in(module))],
                )
                for name, router, outputs in beside
            )
            name, router, fits = next((one for one in fitting if one[2]), ("", None, []))
            if len(fits) == 1:
                kind = type(router).__name__
                sites[kind, pattern_of(name)] = Site(kind, pattern_of(name), fits[0])
            if fits:
                break
    return list(sites.values())


def _are_logits(x: torch.Tensor, tokens: int, experts: int) -> bool:
    """A value for each token and expert, and no probability."""
    if (
        not x.is_floating_point()
        or x.ndim < 2
        or x.shape[-1] != experts
        or x.numel() != tokens * experts
    ):
        return False
    return bool((x < 0).any() or (x > 1).any())


def _choices(model: nn.Module, case: TinyCase) -> dict[str, int]:
    """How many experts each token chooses, by stack of experts."""
    return {name: chosen.shape[-1] for name, chosen in _chosen(model, case).items()}


@torch.no_grad()
def _chosen(model: nn.Module, case: TinyCase) -> dict[str, torch.Tensor]:
    """The experts of each token, by stack, of those whose calls tell."""
    found: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in find_experts(model).items():
        if style_of(module) is RoutedExperts:

            def see(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                found[name] = [*args, *kwargs.values()][1].detach().clone()

            handles.append(module.register_forward_pre_hook(see, with_kwargs=True))
    try:
        model(**case.inputs(ROWS, WIDTH), use_cache=False)  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()
    return found


def _biases(model: Any, case: TinyCase) -> dict[str, str]:
    """Vectors that decide which experts are chosen and nothing else, by stack of experts: no gradient moves them."""
    found: dict[str, str] = {}
    for stack, chosen in _chosen(model, case).items():
        parent, experts = stack.rpartition(".")[0], experts_in(model.get_submodule(stack))
        if pattern_of(stack) in found:
            continue
        inside = model.get_submodule(parent)
        own = dict(inside.named_parameters()) | dict(inside.named_buffers())
        for name, tensor in own.items():
            if (
                tensor.numel() != experts
                or not tensor.is_floating_point()
                or name.startswith(stack[len(parent) + 1 :])
            ):
                continue
            if _decides(model, case, stack, tensor, chosen) and not _has_gradient(
                model, case, tensor
            ):
                found[pattern_of(stack)] = pattern_of(f"{parent}.{name}")
    return found


@torch.no_grad()
def _decides(
    model: Any, case: TinyCase, stack: str, tensor: torch.Tensor, before: torch.Tensor
) -> bool:
    """Whether a large value at an expert's place has every token choose it."""
    flat = tensor.data.view(-1)
    expert = int(torch.bincount(before.flatten(), minlength=tensor.numel()).argmin())
    kept = flat[expert].clone()
    flat[expert] += LARGE
    after = _chosen(model, case)[stack]
    flat[expert] = kept
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
