"""Where a model may be cut: its blocks in execution order, and what passes from one to the next.

The facts come from a tiny model of the same class (facts.py). A block of the large model
corresponds to a tiny one by its place in its stack: the first, one in the middle, or the last. An
encoder–decoder model has two stacks, and the encoder's blocks run first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.core.compat.torch_private import tree_flatten, tree_unflatten
from shardwise.nn.models.build import find_blocks
from shardwise.nn.tiny.case import CannotParallelize

# A tensor among the arguments of a call: the argument, and the index of the tensor within it.
Place = tuple[int | str, int]


class Arguments:
    """The arguments of a call as a flat, mutable mapping of `leaves`."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._positional = len(args)
        self._specs: dict[int | str, Any] = {}
        self.leaves: dict[Place, Any] = {}
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in named:
            leaves, self._specs[name] = tree_flatten(value)
            for i, leaf in enumerate(leaves):
                self.leaves[name, i] = leaf

    def rebuilt(self) -> tuple[list[Any], dict[str, Any]]:
        """Returns args and kwargs with the present leaves."""
        values: dict[Any, Any] = {}
        for name, spec in self._specs.items():
            leaves = [self.leaves[name, i] for i in range(spec.num_leaves)]
            values[name] = tree_unflatten(leaves, spec)
        return [values.pop(i) for i in range(self._positional)], values


@dataclass(frozen=True)
class SameShapeAs:
    """A tensor that a block returns in the shape of one of its arguments."""

    place: Place


@dataclass(frozen=True)
class OutputShape:
    """A tensor that a block returns in a shape of its own."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """What a block returns: a SameShapeAs or OutputShape for each tensor, other leaves unchanged.

    `input_shape` is that of the tiny block's input, by which sizes are translated.
    """

    spec: Any
    leaves: tuple[Any, ...]
    input_shape: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One run of a block: which of its arguments depend on parameters, and what it returns.

    `parameters`: those outside of the blocks that are needed between the beginning of this block
    and that of the next (the embedding for the first block, the head for the last).
    """

    block: str
    inputs: tuple[Place, ...]
    output: Output
    parameters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StageFacts:
    """Facts about a tiny model.

    `blocks`: all of them; `calls`: those that run, in order. `outside`: the parameters outside of
    the blocks that run. `fault(at, in_place)`: tries a cut before call `at`, and returns why it
    fails or "".
    """

    blocks: tuple[str, ...]
    calls: tuple[Call, ...]
    outside: frozenset[str]
    fault: Callable[[int, bool], str]


@dataclass(frozen=True)
class Cut:
    """A model in chunks: its blocks in execution order, and each chunk's range of them.

    `in_place`: received tensors are copied into the arguments that the first block is called with.
    Code around the blocks that continues with these tensors (a residual that XLM adds there) then
    has the right values too.
    """

    calls: tuple[Call, ...]
    ranges: tuple[tuple[int, int], ...]
    outside: frozenset[str]
    in_place: bool = False

    def _calls_of(self, chunk: int) -> tuple[Call, ...]:
        begin, end = self.ranges[chunk]
        return self.calls[begin:end]

    def blocks(self, chunk: int) -> frozenset[str]:
        """Returns the names of a chunk's blocks."""
        return frozenset(call.block for call in self._calls_of(chunk))

    def needs(self, chunk: int, name: str) -> bool:
        """Whether a chunk needs a parameter outside of the blocks; True for unknown ones."""
        needed = frozenset().union(*(call.parameters for call in self._calls_of(chunk)))
        if name in self.outside:
            return name in needed
        while "." in name:  # a new parameter, such as an adapter's, goes with the module it is in
            name = name.rpartition(".")[0]
            if siblings := {n for n in self.outside if n.startswith(name + ".")}:
                return bool(siblings & needed)
        return True


def cut_model(
    model: nn.Module, facts: StageFacts, stages: int, weights: Mapping[str, float] | None = None
) -> Cut:
    """Returns a cut into `stages` chunks, balanced by the blocks' weights (default: parameters)."""
    calls, tiny_calls = _stretch(facts, [name for name, _ in find_blocks(model)])
    if len(calls) < stages:
        raise CannotParallelize("", f"{len(calls)} blocks cannot be divided among {stages} stages")
    weights = weights or sizes_of(model)
    sizes = [weights[call.block] for call in calls]
    faults: list[str] = []
    for in_place in (False, True):
        allowed = [True] * len(calls)
        while ranges := balance(sizes, stages, allowed):
            for begin, _ in ranges[1:]:
                if fault := _first_fault(facts, tiny_calls[begin], in_place):
                    allowed[begin] = False
                    faults.append(f"{calls[begin].block}: {fault}")
            if all(allowed[begin] for begin, _ in ranges):
                return Cut(tuple(calls), ranges, facts.outside, in_place)
    raise CannotParallelize("", faults[0])


def _first_fault(facts: StageFacts, tiny_calls: Iterable[int], in_place: bool) -> str:
    for at in tiny_calls:
        if fault := facts.fault(at, in_place):
            return fault
    return ""


def sizes_of(model: nn.Module) -> dict[str, float]:
    """Returns the number of parameters of each block, to which work and memory are proportional."""
    sizes: dict[str, float] = {}
    for name, block in find_blocks(model):
        sizes[name] = float(sum(p.numel() for p in block.parameters()))
    return sizes


def balance(
    weights: Sequence[float], parts: int, allowed: Sequence[bool] = ()
) -> tuple[tuple[int, int], ...] | None:
    """Returns consecutive ranges whose heaviest is as light as possible; None if there are none.

    `allowed[i]`: whether a range may begin at i.
    """
    total = [0.0, *itertools.accumulate(weights)]
    begins = [i for i in range(1, len(weights)) if not allowed or allowed[i]]
    ends = [*begins, len(weights)]
    # best[end]: the weight of the heaviest part, and where each begins, for the blocks before `end`
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (total[end], (0,)) for end in ends}
    for _ in range(parts - 1):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            options = []
            for begin in begins:
                if begin in best and begin < end:
                    heaviest, before = best[begin]
                    options.append((max(heaviest, total[end] - total[begin]), (*before, begin)))
            if options:
                longer[end] = min(options)
        best = longer
    if len(weights) not in best:
        return None
    return tuple(itertools.pairwise((*best[len(weights)][1], len(weights))))


def _stretch(facts: StageFacts, names: Sequence[str]) -> tuple[list[Call], list[list[int]]]:
    """Returns the calls of a model with these blocks, and the tiny calls that each is like."""
    calls = facts.calls
    if facts.blocks == tuple(names):
        return list(calls), [[i] for i in range(len(calls))]
    called = {call.block for call in calls}
    if len(called) < len(calls):
        raise CannotParallelize(
            calls[0].block,
            "it runs several times in a forward, how often in the large model is not known",
        )
    # Parameters in lists that are as long as the stacks.
    numbered = {name for name in facts.outside if re.search(r"\.\d+(\.|$)", name)}
    stretched: list[Call] = []
    tiny_calls: list[list[int]] = []
    for stack, group in itertools.groupby(range(len(calls)), key=lambda i: _stack(calls[i].block)):
        tiny = list(group)
        blocks = [name for name in names if _stack(name) == stack]
        if len(tiny) < 2 < len(blocks):
            raise CannotParallelize(
                stack, "a small model of this class has but one block, which shows too little"
            )
        for i, name in enumerate(blocks):
            before = tiny[1:] if i else tiny[:1]
            like = [calls[j] for j in _like(i, len(blocks), tiny)]
            call = _merged(like, [calls[j] for j in before])
            tiny_calls.append(before)
            stretched.append(replace(call, block=name, parameters=call.parameters | numbered))
    idle = {_stack(name) for name in facts.blocks if name not in called}
    if not stretched or not idle.isdisjoint(_stack(name) for name in called):
        raise CannotParallelize(
            "", "the blocks of a small model of this class do not correspond to its own"
        )
    return stretched, tiny_calls


def _stack(block: str) -> str:
    return block.rpartition(".")[0]


def _like(place: int, count: int, tiny: list[int]) -> list[int]:
    """Returns the tiny calls that may resemble the block at `place` in a stack of `count`."""
    if count > 1 and len(tiny) > 2 and 0 < place < count - 1:
        return tiny[1:-1]
    ends = []
    if place == 0:
        ends.append(tiny[0])
    if place == count - 1:
        ends.append(tiny[-1])
    return ends or tiny


def _merged(like: list[Call], readers: Iterable[Call]) -> Call:
    inputs: dict[Place, None] = {}
    for call in (*readers, *like):
        inputs |= dict.fromkeys(call.inputs)
    parameters = frozenset().union(*(call.parameters for call in like))
    return replace(like[0], inputs=tuple(inputs), parameters=parameters)
