"""What each rank of a pipeline does in a step: actions, and the messages exchanged between them.

[Note: one order of messages] An NCCL send or receive occupies the device until its partner arrives,
and the host may have to wait for its device at any call (the first launch of a kernel loads it, an
allocation may free memory). So no rank may have an operation on its device whose partner needs
anything more from this rank. Messages therefore have one total order, which is the same on all
ranks: the times at which a run of the schedule on paper produces them. A rank exchanges a message
after the actions that begin before that time and before those that begin later. Even if every
operation blocks its rank until its partner arrives, the first message in this order that was not
exchanged waits for nobody, so no rank waits for ever; `run_blocked` plays exactly that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from shardwise.parallel.pipeline.schedule import Action, Orders, Schedule, run_on_paper

Way = Literal["forward", "backward"]
DURATIONS = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}


class Message(NamedTuple):
    """What one chunk computes for another: hidden states, or their gradients."""

    way: Way
    chunk: int  # that needs it
    micro: int


class Exchange(NamedTuple):
    """Messages that are produced at the same time, posted in one call."""

    messages: tuple[Message, ...]


Program = tuple[Action | Exchange, ...]


def message_of(action: Action, chunks: int) -> Message | None:
    """What an action produces for another chunk."""
    if action.kind == "forward":
        following = action.chunk + 1
        return Message("forward", following, action.micro) if following < chunks else None
    if action.kind in ("backward", "input") and action.chunk > 0:
        return Message("backward", action.chunk - 1, action.micro)
    return None


def source_of(message: Message) -> int:
    """The chunk that produces a message."""
    return message.chunk - 1 if message.way == "forward" else message.chunk + 1


@functools.cache
def programs(
    schedule: Schedule, ranks: int, micros: int, forwards_only: bool
) -> tuple[Program, ...]:
    """The programs of a step (or of an evaluation) of `micros` micro-batches."""
    orders = schedule.orders(ranks, micros)
    if forwards_only:
        orders = tuple(tuple(a for a in order if a.kind == "forward") for order in orders)
    return programs_of(orders, schedule.owners(ranks), schedule.splits)


def programs_of(orders: Orders, owners: Sequence[int], splits: bool) -> tuple[Program, ...]:
    """The program of each rank. See [Note: one order of messages]."""
    timelines: list[list[tuple[float, int, Action | Message]]] = [[] for _ in orders]
    for span in run_on_paper(orders, len(owners), splits, lambda a: DURATIONS[a.kind]):
        timelines[span.rank].append((span.begin, 1, span.action))
        message = message_of(span.action, len(owners))
        if message is not None and owners[message.chunk] != span.rank:
            timelines[span.rank].append((span.end, 0, message))
            timelines[owners[message.chunk]].append((span.end, 0, message))
    return tuple(tuple(_program(sorted(timeline))) for timeline in timelines)


def _program(timeline: list[tuple[float, int, Action | Message]]) -> Iterator[Action | Exchange]:
    for _, entries in groupby(timeline, key=lambda entry: entry[:2]):
        items = [item for _, _, item in entries]
        messages = tuple(item for item in items if isinstance(item, Message))
        if messages:
            yield Exchange(messages)
        else:
            yield from (item for item in items if isinstance(item, Action))


def run_blocked(programs: Sequence[Program], owners: Sequence[int]) -> None:
    """Runs programs on paper; each exchange blocks its rank until all partners reach theirs.

    That is the worst that NCCL and a host that waits for its device can do. Raises ValueError if
    ranks wait for ever, or if an action runs before its input has arrived.
    """
    position = [0] * len(programs)
    reached: dict[Message, set[int]] = {}
    produced: set[Message] = set()
    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                item = program[position[rank]]
                if isinstance(item, Action):
                    _check_arrived(item, rank, owners, reached)
                    message = message_of(item, len(owners))
                    if message is not None:
                        produced.add(message)
                else:
                    for message in item.messages:
                        if owners[source_of(message)] == rank and message not in produced:
                            raise ValueError(f"rank {rank} sends {message} before it computed it")
                        progress |= rank not in reached.setdefault(message, set())
                        reached[message].add(rank)
                    if any(len(reached[message]) < 2 for message in item.messages):
                        break
                position[rank] += 1
                progress = True
    for rank, program in enumerate(programs):
        if position[rank] < len(program):
            raise ValueError(f"rank {rank} waits for ever at {program[position[rank]]}")


def _check_arrived(
    action: Action, rank: int, owners: Sequence[int], reached: dict[Message, set[int]]
) -> None:
    way: Way | None = {"forward": "forward", "weight": None}.get(action.kind, "backward")  # type: ignore[assignment]
    if way is None:
        return
    message = Message(way, action.chunk, action.micro)
    source = source_of(message)
    if 0 <= source < len(owners) and owners[source] != rank and len(reached.get(message, ())) < 2:
        raise ValueError(f"rank {rank} runs {action} before {message} arrived")
