"""Learns how a class of models can be cut, from a tiny one that runs here.

One forward shows the order of the blocks and which of their arguments come from parameters. A forward block by block
shows which other parameters each of them needs. Where the large one is to be cut, the tiny one is cut in two first and
has to give the loss and the gradients of the whole: what passes from block to block by other ways than arguments (a
list of all layers' outputs, a cache) shows here and nowhere else.
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
    Like,
    Output,
    OutputShape,
    Place,
    StageFacts,
)
from shardwise.parallel.pipeline.schedule import Schedule
from shardwise.parallel.pipeline.stage import Passed, StageIO, Stages

ROWS, WIDTH = 2, 12


def probe(case: TinyCase) -> StageFacts:
    """What is true of how models of a class can be cut; takes about a second."""
    model, case = _deep(case)
    facts = _find_lives(copy.deepcopy(model), _watch(copy.deepcopy(model), case), case)
    wanted = _whole(copy.deepcopy(model), case)
    return replace(
        facts, fault=functools.cache(functools.partial(_fault, model, facts, case, wanted))
    )


def _deep(case: TinyCase) -> tuple[Any, TinyCase]:
    """The model, if possible with stacks in which there is a middle."""
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
    """Something that every logit has a different part in."""
    logits = model(**case.inputs(ROWS, WIDTH), use_cache=False).logits
    weights = torch.arange(logits.numel(), dtype=logits.dtype).cos().view_as(logits)
    loss: torch.Tensor = (logits * weights).mean()
    return loss


def _whole(model: Any, case: TinyCase) -> LossAndGradients:
    loss = _loss(model, case)
    loss.backward()  # type: ignore[no-untyped-call]
    return LossAndGradients(loss.item(), gradients_of(model))


def _watch(model: nn.Module, case: TinyCase) -> StageFacts:
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
    called = tuple({call.block for call in calls})
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    outside = frozenset(
        n for n in names if not n.startswith(tuple(f"{block}." for block in called))
    )
    return StageFacts(tuple(name for name, _ in blocks), tuple(calls), outside, lambda at, into: "")


@contextmanager
def _hooks(blocks: list[tuple[str, nn.Module]], calls: list[Call]) -> Iterator[None]:
    handles = []
    made: dict[
        int, torch.Tensor
    ] = {}  # by blocks so far; kept, so that no other tensor gets their place in memory
    for name, block in blocks:

        def hook(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            calls.append(_call(name, Arguments(args, kwargs), output, made))
            made.update(
                {
                    id(leaf): leaf
                    for leaf in tree_flatten(output)[0]
                    if isinstance(leaf, torch.Tensor)
                }
            )

        handles.append(block.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call(name: str, arguments: Arguments, output: Any, made: Mapping[int, torch.Tensor]) -> Call:
    """What comes from parameters (each has a gradient here, so it asks for its own) or from blocks is to be taken."""
    tensors = {p: x for p, x in arguments.leaves.items() if isinstance(x, torch.Tensor)}
    takes = {p: x for p, x in tensors.items() if x.requires_grad or id(x) in made}
    if not takes:
        raise CannotParallelize(name, "none of its arguments comes from the blocks before it")
    free: dict[Place, torch.Size] = {place: x.shape for place, x in takes.items()}
    leaves, spec = tree_flatten(output)
    found: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif (
            place := next((p for p, shape in free.items() if shape == leaf.shape), None)
        ) is not None:
            found.append(Like(place))
            del free[place]
        else:
            found.append(OutputShape(tuple(leaf.shape)))
    return Call(
        name, tuple(takes), Output(spec, tuple(found), tuple(next(iter(takes.values())).shape))
    )


def _find_lives(model: nn.Module, facts: StageFacts, case: TinyCase) -> StageFacts:
    """Each block as a chunk of its own: the gradients of what it makes show what it was made from.

    Of parameters that have no gradient (tables of positions) this shows nothing: they are needed everywhere.
    """
    count = len(facts.calls)
    cut = Cut(facts.calls, tuple((i, i + 1) for i in range(count)), facts.outside)
    stages = Stages(model, cut, 0, 1, Schedule("interleaved", count))
    everything = dict(model.named_parameters(remove_duplicate=False))
    named = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
    fixed = frozenset(everything.keys() - named.keys()) & facts.outside
    calls, wire = [], None
    for chunk, call in enumerate(facts.calls):
        passed = stages.forward(chunk, wire, lambda: _loss(model, case))
        wire = passed.wire
        made = [passed.result] if wire is None else wire.differentiable
        gradients = torch.autograd.grad(
            [x.sum() for x in made], list(named.values()), allow_unused=True
        )
        lives = {
            n for n, g in zip(named, gradients, strict=True) if g is not None and n in facts.outside
        }
        calls.append(replace(call, lives=fixed | lives))
    return replace(facts, calls=tuple(calls))


def _fault(
    model: nn.Module,
    facts: StageFacts,
    case: TinyCase,
    wanted: LossAndGradients,
    at: int,
    into: bool,
) -> str:
    """Why a model cannot be cut in two before a block; "" if it can."""
    if at == 0:
        return ""
    cut = Cut(facts.calls, ((0, at), (at, len(facts.calls))), facts.outside, into)
    try:
        answer = _in_two(
            [Stages(copy.deepcopy(model), cut, rank, 2, Schedule("1f1b")) for rank in range(2)],
            case,
        )
    except CannotParallelize as refusal:
        return refusal.why
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        return f"a model cut before it does not run ({type(error).__name__}: {text})"
    verdict = judge(answer, wanted)
    if verdict.right:
        return ""
    what = "the loss" if verdict.gradient == 0 else f"the gradient of {verdict.module}"
    return f"a model cut before it computes something else ({what}): more passes from block to block than arguments"


def _in_two(halves: list[Stages], case: TinyCase) -> LossAndGradients:
    first, last = halves
    begun: Passed = first.forward(0, None, lambda: _loss(first.model, case))
    assert begun.wire is not None
    wire = StageIO(begun.wire.ports, tuple(tensor.detach() for tensor in begun.wire.tensors))
    ended = last.forward(1, wire, lambda: _loss(last.model, case))
    ended.result.backward()
    back = [
        given.grad if given.grad is not None else torch.zeros_like(given) for given in ended.given
    ]
    taken = [g for port, g in zip(wire.ports, back, strict=True) if port.grad]
    torch.autograd.backward(begun.wire.differentiable, taken)
    summed: dict[str, torch.Tensor] = {}
    for half in halves:
        for name, gradient in gradients_of(half.model).items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    return LossAndGradients(ended.result.item(), summed)
