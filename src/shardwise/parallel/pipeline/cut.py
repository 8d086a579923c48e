"""Where a model may be cut: its blocks in the order in which they run, and what passes from one to the next.

What is known comes from a tiny model of the same class (facts.py). A block of the large model is like the tiny one's by
its place in its stack: the first, one in the middle, or the last. An encoder–decoder model has two stacks, the
encoder's blocks running first.
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

Place = tuple[
    int | str, int
]  # a tensor among the arguments of a call: the argument, and which tensor within it


class Arguments:
    """The arguments of a call, tensor by tensor."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._positional = len(args)
        self._specs: dict[int | str, Any] = {}
        self.leaves: dict[Place, Any] = {}
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in named:
            leaves, self._specs[name] = tree_flatten(value)
            self.leaves |= {(name, i): leaf for i, leaf in enumerate(leaves)}

    def rebuilt(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with the leaves as they are now."""
        values: dict[Any, Any] = {}
        for name, spec in self._specs.items():
            values[name] = tree_unflatten(
                [self.leaves[name, i] for i in range(spec.num_leaves)], spec
            )
        return [values.pop(i) for i in range(self._positional)], values


@dataclass(frozen=True)
class Like:
    """A tensor that a block returns in the shape of one of its arguments."""

    place: Place


@dataclass(frozen=True)
class OutputShape:
    """A tensor that a block returns in a shape of its own."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Output:
    """What a block returns: a Like or a Shape for each tensor, anything else as it is.

    `like` is the shape of the tiny block's input, by which sizes are translated.
    """

    spec: Any
    leaves: tuple[Any, ...]
    like: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One run of a block: the arguments that come from parameters, what it returns, and parameters outside of blocks
    that are needed from its begin to that of the next (the embedding for the first, the head for the last)."""

    block: str
    takes: tuple[Place, ...]
    gives: Output
    lives: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StageFacts:
    """Of a tiny model: its blocks, and as they run; the names of its parameters outside of the blocks that run; and why
    it cannot be cut before a run ("" if it can), which is tried when it is asked for."""

    blocks: tuple[str, ...]
    calls: tuple[Call, ...]
    outside: frozenset[str]
    fault: Callable[[int, bool], str]


@dataclass(frozen=True)
class Cut:
    """A model in chunks: its blocks as they run, and from which to which each chunk goes.

    `into`: what comes by wire is written into the tensors that the first block is given. Code around the blocks that
    goes on with its own (a residual that is added there, in XLM) then has the right ones too.
    """

    calls: tuple[Call, ...]
    ranges: tuple[tuple[int, int], ...]
    outside: frozenset[str]
    into: bool = False

    def blocks(self, chunk: int) -> frozenset[str]:
        """The names of a chunk's blocks."""
        return frozenset(call.block for call in self.calls[slice(*self.ranges[chunk])])

    def needs(self, chunk: int, name: str) -> bool:
        """Whether a chunk needs a parameter that lies outside of the blocks; yes, where nothing is known of it."""
        lives = frozenset().union(*(call.lives for call in self.calls[slice(*self.ranges[chunk])]))
        if name in self.outside:
            return name in lives
        while "." in name:  # something new, such as an adapter, goes where what it is part of goes
            name = name.rpartition(".")[0]
            if known := [one for one in self.outside if one.startswith(name + ".")]:
                return any(one in lives for one in known)
        return True


def cut_model(
    model: nn.Module, facts: StageFacts, stages: int, weights: Mapping[str, float] | None = None
) -> Cut:
    """Divides a model into as many chunks, as evenly as may be by the weights of its blocks (default: parameters)."""
    blocks = dict(find_blocks(model))
    calls, like = _stretch(facts, list(blocks))
    if len(calls) < stages:
        raise CannotParallelize("", f"{len(calls)} blocks cannot be divided among {stages} stages")
    size = weights or sizes_of(model)
    sizes = [size[call.block] for call in calls]
    faults: list[str] = []
    for into in (False, True):
        allowed = [True] * len(calls)
        while ranges := balance(sizes, stages, allowed):
            for begin, _ in ranges[1:]:
                if fault := next(
                    (fault for at in like[begin] if (fault := facts.fault(at, into))), ""
                ):
                    allowed[begin] = False
                    faults.append(f"{calls[begin].block}: {fault}")
            if all(allowed[begin] for begin, _ in ranges):
                return Cut(tuple(calls), ranges, facts.outside, into)
    raise CannotParallelize("", faults[0])


def sizes_of(model: nn.Module) -> dict[str, float]:
    """The parameters of each block: work and memory go with them."""
    return {
        name: float(sum(p.numel() for p in block.parameters()))
        for name, block in find_blocks(model)
    }


def balance(
    weights: Sequence[float], parts: int, allowed: Sequence[bool] = ()
) -> tuple[tuple[int, int], ...] | None:
    """Consecutive ranges whose heaviest is as light as can be; `allowed[i]`: whether one may begin at i."""
    total = [0.0, *itertools.accumulate(weights)]
    places = [i for i in range(1, len(weights)) if not allowed or allowed[i]]
    # best[i]: (the heaviest part, the begins) of the first i blocks in so many parts
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        i: (total[i], (0,)) for i in [*places, len(weights)]
    }
    for count in range(2, parts + 1):
        best = {
            end: min(
                (max(best[i][0], total[end] - total[i]), (*best[i][1], i))
                for i in places
                if i in best and i < end
            )
            for end in [*places, len(weights)]
            if any(i in best and i < end for i in places)
        }
        if count < parts:
            best.pop(len(weights), None)
    if len(weights) not in best:
        return None
    begins = best[len(weights)][1]
    return tuple(itertools.pairwise((*begins, len(weights))))


def _stretch(facts: StageFacts, names: Sequence[str]) -> tuple[list[Call], list[list[int]]]:
    """The calls of a model with these blocks, and the tiny ones before which a cut is like one before each."""
    calls = facts.calls
    if facts.blocks == tuple(names):
        return list(calls), [[i] for i in range(len(calls))]
    called = {call.block for call in calls}
    if len(called) < len(calls):
        raise CannotParallelize(
            calls[0].block,
            "it runs several times in a forward, how often in the large model is not known",
        )
    numbered = {
        name for name in facts.outside if re.search(r"\.\d+(\.|$)", name)
    }  # lists that are as long as stacks
    stretched: list[Call] = []
    like: list[list[int]] = []
    for stack, places in itertools.groupby(range(len(calls)), key=lambda i: _stack(calls[i].block)):
        tiny = list(places)
        wanted = [name for name in names if _stack(name) == stack]
        if len(tiny) < 2 < len(wanted):
            raise CannotParallelize(
                stack, "a small model of this class has but one block, which shows too little"
            )
        for i, name in enumerate(wanted):
            like.append(tiny[1:] if i else tiny[:1])
            call = _merged(
                [calls[j] for j in _like(i, len(wanted), tiny)], [calls[j] for j in like[-1]]
            )
            stretched.append(replace(call, block=name, lives=call.lives | numbered))
    idle = {_stack(call.block) for call in calls} & {
        _stack(name) for name in facts.blocks if name not in called
    }
    if idle or not stretched:
        raise CannotParallelize(
            "", "the blocks of a small model of this class do not correspond to its own"
        )
    return stretched, like


def _stack(block: str) -> str:
    return block.rpartition(".")[0]


def _like(place: int, count: int, tiny: list[int]) -> list[int]:
    """The tiny blocks that one block of a stack may be like."""
    if count == 1 or len(tiny) < 3:
        ends = ([tiny[0]] if place == 0 else []) + ([tiny[-1]] if place == count - 1 else [])
        return ends or tiny
    return [tiny[0]] if place == 0 else [tiny[-1]] if place == count - 1 else tiny[1:-1]


def _merged(like: list[Call], takers: Iterable[Call]) -> Call:
    takes = dict.fromkeys(place for call in (*takers, *like) for place in call.takes)
    return replace(
        like[0], takes=tuple(takes), lives=frozenset().union(*(call.lives for call in like))
    )
