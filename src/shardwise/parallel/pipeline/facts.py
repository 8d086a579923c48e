"""Learns how a class of models can be cut, from a tiny one that runs here.

One forward shows the order of the blocks and which of their arguments depend on parameters. A
forward block by block shows which other parameters each of them needs. Where the large model is to
be cut, the tiny one is cut in two first and must reproduce the loss and gradients of the full
model. Only this reveals what passes between blocks other than as an argument (a list of all layers'
outputs, a cache).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.core.compat.torch_private import tree_flatten
from shardwise.nn.models.build import find_blocks
from shardwise.nn.tiny.case import (
    CannotParallelize,
    LossAndGradients,
    TinyCase,
    gradients_of,
    judge,
)
from shardwise.parallel.pipeline.cut import (
    Arguments,
    Call,
    Cut,
    Output,
    OutputShape,
    Place,
    SameShapeAs,
    StageFacts,
)
from shardwise.parallel.pipeline.schedule import Schedule
from shardwise.parallel.pipeline.stage import ChunkForward, StageIO, Stages

ROWS, WIDTH = 2, 12


def probe(case: TinyCase) -> StageFacts:
    """Returns the facts by which models of a class can be cut; takes about a second."""
    model, case = _deepened(case)
    facts = _find_parameters(copy.deepcopy(model), _trace(copy.deepcopy(model), case), case)
    expected = _uncut(copy.deepcopy(model), case)
    fault = functools.partial(_fault, model, facts, case, expected)
    return replace(facts, fault=functools.cache(fault))


def _deepened(case: TinyCase) -> tuple[Any, TinyCase]:
    """Returns the model, if possible with stacks of three blocks, of which one is in the middle."""
    config = copy.deepcopy(case.config)
    for name in ("encoder_layers", "num_encoder_layers"):
        if getattr(config, name, None) == 2:
            setattr(config, name, 3)
    deep = replace(case, config=config)
    try:
        return deep.model(), deep
    except ValueError:  # some configs have lists as long as their stacks
        return case.model(), case


def _loss(model: Any, case: TinyCase) -> torch.Tensor:
    """Returns a loss to which every logit contributes differently."""
    logits = model(**case.inputs(ROWS, WIDTH), use_cache=False).logits
    weights = torch.arange(logits.numel(), dtype=logits.dtype).cos().view_as(logits)
    loss: torch.Tensor = (logits * weights).mean()
    return loss


def _uncut(model: Any, case: TinyCase) -> LossAndGradients:
    loss = _loss(model, case)
    loss.backward()  # type: ignore[no-untyped-call]
    return LossAndGradients(loss.item(), gradients_of(model))


def _trace(model: nn.Module, case: TinyCase) -> StageFacts:
    blocks = find_blocks(model)
    if not blocks:
        raise CannotParallelize("", "no repeated blocks are found in it")
    calls: list[Call] = []
    with _hooks(blocks, calls):
        _loss(model, case)
    if not calls:
        raise CannotParallelize(
            blocks[0][0],
            "its code runs without the module being called, so it cannot be intercepted",
        )
    called = tuple({f"{call.block}." for call in calls})
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    outside = frozenset(name for name in names if not name.startswith(called))
    return StageFacts(tuple(name for name, _ in blocks), tuple(calls), outside, lambda *_: "")


@contextmanager
def _hooks(blocks: list[tuple[str, nn.Module]], calls: list[Call]) -> Iterator[None]:
    handles = []
    # Outputs of blocks so far, referenced so that no other tensor gets their id.
    outputs: dict[int, torch.Tensor] = {}
    for name, block in blocks:

        def hook(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls.append(_call(name, Arguments(args, kwargs), output, outputs))
            for leaf in tree_flatten(output)[0]:
                if isinstance(leaf, torch.Tensor):
                    outputs[id(leaf)] = leaf

        handles.append(block.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call(
    name: str, arguments: Arguments, output: Any, outputs: Mapping[int, torch.Tensor]
) -> Call:
    """Finds the arguments that are outputs of blocks or depend on parameters.

    In this model every parameter has a gradient, so what depends on one requires a gradient.
    """
    inputs: dict[Place, torch.Size] = {}
    for place, x in arguments.leaves.items():
        if isinstance(x, torch.Tensor) and (x.requires_grad or id(x) in outputs):
            inputs[place] = x.shape
    if not inputs:
        raise CannotParallelize(name, "none of its arguments comes from the blocks before it")
    unmatched = dict(inputs)
    leaves, spec = tree_flatten(output)
    described: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            described.append(leaf)
            continue
        match = next((p for p, shape in unmatched.items() if shape == leaf.shape), None)
        if match is None:
            described.append(OutputShape(tuple(leaf.shape)))
        else:
            described.append(SameShapeAs(match))
            del unmatched[match]
    input_shape = tuple(next(iter(inputs.values())))
    return Call(name, tuple(inputs), Output(spec, tuple(described), input_shape))


def _find_parameters(model: nn.Module, facts: StageFacts, case: TinyCase) -> StageFacts:
    """Runs each block as its own chunk: the gradients of its output show what it depends on.

    Parameters without a gradient (tables of positions) are taken to be needed everywhere.
    """
    count = len(facts.calls)
    cut = Cut(facts.calls, tuple((i, i + 1) for i in range(count)), facts.outside)
    stages = Stages(model, cut, 0, 1, Schedule("interleaved", count))
    trainable: dict[str, nn.Parameter] = {}
    fixed: set[str] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            trainable[name] = parameter
        elif name in facts.outside:
            fixed.add(name)
    calls: list[Call] = []
    wire: StageIO | None = None
    for chunk, call in enumerate(facts.calls):
        passed = stages.forward(chunk, wire, lambda: _loss(model, case))
        wire = passed.wire
        outputs = [passed.result] if wire is None else wire.differentiable
        gradients = torch.autograd.grad(
            [x.sum() for x in outputs], list(trainable.values()), allow_unused=True
        )
        used = {n for n, g in zip(trainable, gradients, strict=True) if g is not None}
        calls.append(replace(call, parameters=frozenset(fixed | (used & facts.outside))))
    return replace(facts, calls=tuple(calls))


def _fault(
    model: nn.Module,
    facts: StageFacts,
    case: TinyCase,
    expected: LossAndGradients,
    at: int,
    in_place: bool,
) -> str:
    """Returns why a model cannot be cut in two before a block; "" if it can."""
    if at == 0:
        return ""
    cut = Cut(facts.calls, ((0, at), (at, len(facts.calls))), facts.outside, in_place)
    try:
        first = Stages(copy.deepcopy(model), cut, 0, 2, Schedule("1f1b"))
        last = Stages(copy.deepcopy(model), cut, 1, 2, Schedule("1f1b"))
        result = _run_in_two(first, last, case)
    except CannotParallelize as refusal:
        return refusal.why
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        return f"a model cut before it does not run ({type(error).__name__}: {text})"
    verdict = judge(result, expected)
    if verdict.right:
        return ""
    what = "the loss" if verdict.gradient == 0 else f"the gradient of {verdict.module}"
    return (
        f"a model cut before it computes something else ({what}): "
        "more passes from block to block than arguments"
    )


def _run_in_two(first: Stages, last: Stages, case: TinyCase) -> LossAndGradients:
    begun: ChunkForward = first.forward(0, None, lambda: _loss(first.model, case))
    assert begun.wire is not None
    wire = StageIO(begun.wire.ports, tuple(tensor.detach() for tensor in begun.wire.tensors))
    ended = last.forward(1, wire, lambda: _loss(last.model, case))
    ended.result.backward()
    gradients: list[torch.Tensor] = []
    for port, x in zip(wire.ports, ended.given, strict=True):
        if port.grad:
            gradients.append(torch.zeros_like(x) if x.grad is None else x.grad)
    torch.autograd.backward(begun.wire.differentiable, gradients)
    total: dict[str, torch.Tensor] = {}
    for half in (first, last):
        for name, gradient in gradients_of(half.model).items():
            total[name] = total[name] + gradient if name in total else gradient
    return LossAndGradients(ended.result.item(), total)
