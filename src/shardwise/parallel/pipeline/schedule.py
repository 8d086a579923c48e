"""Pipeline schedules as plain data: which rank computes which chunk of which micro-batch, and when.

A model is cut into chunks of consecutive blocks, numbered in forward order; a rank owns one or
several. A schedule is a list of actions per rank. Nothing here computes: schedules are checked and
simulated before they run. To add one, see config/schedules.py.

[Note: any number of micro-batches] Actions of different micro-batches depend on one another only
through the order on each rank. An order with all actions of some micro-batches removed is therefore
still free of deadlocks: schedules that require a multiple of the ranks, or a minimum, are built for
more micro-batches and reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwise.config.schedules import SCHEDULES, ScheduleName
from shardwise.config.schema import Parallel

# A backward is one action, or two: for the inputs and for the weights.
Kind = Literal["forward", "backward", "input", "weight"]
SIGNS: dict[Kind, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}


class Action(NamedTuple):
    """One kind of work of one chunk on one micro-batch."""

    kind: Kind
    chunk: int
    micro: int


Orders = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class ActionSpan:
    """When an action ran, in seconds since its step began."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """A schedule by name; `chunks` is how many parts of the model each rank owns."""

    style: ScheduleName
    chunks: int = 1

    def __post_init__(self) -> None:
        traits = SCHEDULES[self.style]
        if self.chunks < 1 if traits.any_chunks else self.chunks != traits.chunks:
            raise ValueError(f"{self.style} does not go with {self.chunks} chunks per rank")

    @property
    def splits(self) -> bool:
        """Whether backwards are split into a part for the inputs and one for the weights."""
        return SCHEDULES[self.style].splits_backward

    def owners(self, ranks: int) -> tuple[int, ...]:
        """Returns the rank of each chunk: in rounds, or forth and back (V)."""
        if self.style == "zbv":
            return (*range(ranks), *reversed(range(ranks)))
        return tuple(chunk % ranks for chunk in range(ranks * self.chunks))

    def orders(self, ranks: int, micros: int) -> Orders:
        """Returns the actions of each rank for a step of `micros` micro-batches."""
        build = {
            "gpipe": _gpipe,
            "naive": _naive,
            "1f1b": _interleaved,
            "interleaved": _interleaved,
            "zbv": _zero_bubble,
        }[self.style]
        orders: list[tuple[Action, ...]] = []
        for rank in range(ranks):
            actions = build(rank, ranks, micros, self.chunks)
            orders.append(tuple(action for action in actions if action.micro < micros))
        return tuple(orders)


def schedule_of(parallel: Parallel) -> Schedule:
    """Returns the schedule that the settings select."""
    return Schedule(parallel.pipeline_schedule, parallel.chunks_per_rank)


def _gpipe(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    forwards = [Action("forward", rank, micro) for micro in range(micros)]
    return forwards + [Action("backward", rank, micro) for micro in range(micros)]


def _naive(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    order: list[Action] = []
    for micro in range(micros):
        order += [Action("forward", rank, micro), Action("backward", rank, micro)]
    return order


def _interleaved(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """Rounds of one micro-batch per rank through each chunk in turn; with one chunk, 1F1B."""
    rounds = -(-micros // ranks)
    forwards: list[Action] = []
    backwards: list[Action] = []
    for first in range(0, rounds * ranks, ranks):
        for chunk in range(chunks):
            for micro in range(first, first + ranks):
                forwards.append(Action("forward", chunk * ranks + rank, micro))
                back = (chunks - 1 - chunk) * ranks + rank
                backwards.append(Action("backward", back, micro))
    ahead = (ranks - 1 - rank) * (1 if chunks == 1 else 2) + (chunks - 1) * ranks
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for i, forward in enumerate(forwards[ahead:]):
        order += [forward, backwards[i]]
    return order + backwards[len(forwards) - ahead :]


def _zero_bubble(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """Zero-bubble V (Qi et al. 2024): weights' backwards fill what would be idle time."""
    micros = max(micros, 2 * ranks - 1)
    near = rank  # this rank's chunk on the way forth
    far = 2 * ranks - 1 - rank  # and on the way back
    done: dict[tuple[Kind, int], int] = {}
    order: list[Action] = []

    def do(kind: Kind, chunk: int) -> None:
        micro = done.get((kind, chunk), 0)
        done[kind, chunk] = micro + 1
        order.append(Action(kind, chunk, micro))

    def count(kind: Kind, chunk: int) -> int:
        return done.get((kind, chunk), 0)

    for _ in range(2 * (ranks - rank) - 1):
        do("forward", near)
    for _ in range(rank):
        do("forward", far)
        do("forward", near)
    for _ in range(ranks - rank):
        do("forward", far)
        do("input", far)
        do("weight", far)
    while count("forward", far) < count("forward", near) or count("forward", near) < micros:
        if count("forward", near) < micros:
            do("forward", near)
        do("input", near)
        do("weight", near)
        do("forward", far)
        do("input", far)
        do("weight", far)
    for _ in range(rank):
        do("input", near)
        do("input", far)
    for _ in range(ranks - rank):
        do("input", near)
        do("weight", near)
    while count("weight", far) < count("input", far):
        do("weight", far)
    while count("weight", near) < count("input", near):
        do("weight", near)
    return order


def needs(action: Action, chunks: int, splits: bool) -> list[Action]:
    """Returns the actions, on any rank, that must precede an action."""
    kind, chunk, micro = action
    if kind == "forward":
        return [Action("forward", chunk - 1, micro)] if chunk else []
    if kind == "weight":
        return [Action("input", chunk, micro)]
    before = [Action("forward", chunk, micro)]
    if chunk + 1 < chunks:
        before.append(Action("input" if splits else "backward", chunk + 1, micro))
    return before


def check_orders(schedule: Schedule, ranks: int, micros: int) -> None:
    """Raises a ValueError unless every owner does each of its actions once, without deadlock."""
    orders = schedule.orders(ranks, micros)
    owned: list[set[Action]] = [set() for _ in range(ranks)]
    kinds: tuple[Kind, ...] = ("forward", "backward")
    if schedule.splits:
        kinds = ("forward", "input", "weight")
    for chunk, owner in enumerate(schedule.owners(ranks)):
        for kind in kinds:
            owned[owner].update(Action(kind, chunk, micro) for micro in range(micros))
    for rank, order in enumerate(orders):
        if len(order) != len(owned[rank]) or set(order) != owned[rank]:
            raise ValueError(
                f"rank {rank} of {ranks} does not do each of its actions once: {schedule}"
            )
    simulate(schedule, ranks, micros, lambda _: 1.0)


def simulate(
    schedule: Schedule, ranks: int, micros: int, seconds: Callable[[Action], float]
) -> list[ActionSpan]:
    """Returns when each action would run if it took `seconds` and messages took no time."""
    orders = schedule.orders(ranks, micros)
    try:
        return run_on_paper(orders, len(schedule.owners(ranks)), schedule.splits, seconds)
    except ValueError as error:
        raise ValueError(f"{error}: {schedule}") from None


def run_on_paper(
    orders: Orders, chunks: int, splits: bool, seconds: Callable[[Action], float]
) -> list[ActionSpan]:
    """As `simulate`, for any orders; ValueError if a rank would wait for ever."""
    ends: dict[Action, float] = {}
    spans: list[ActionSpan] = []
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                before = needs(action, chunks, splits)
                if not all(needed in ends for needed in before):
                    break
                begin = max([free[rank], *(ends[needed] for needed in before)])
                end = begin + seconds(action)
                free[rank] = end
                ends[action] = end
                spans.append(ActionSpan(rank, action, begin, end))
                position[rank] += 1
                progress = True
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            raise ValueError(f"rank {rank} waits for ever at {order[position[rank]]}")
    return spans


def bubble(spans: Sequence[ActionSpan], ranks: int) -> float:
    """Returns the share of the ranks' time, from the first action to the last, that was idle."""
    if not spans:
        return 0.0
    available = ranks * (max(s.end for s in spans) - min(s.begin for s in spans))
    busy = sum(s.end - s.begin for s in spans)
    return 1 - busy / available if available else 0.0


def picture(spans: Sequence[ActionSpan], ranks: int, width: int = 100) -> str:
    """Returns a line per rank: each action's sign and micro-batch where it ran, dots if idle."""
    if not spans:
        return ""
    start = min(s.begin for s in spans)
    end = max(s.end for s in spans)
    scale = width / (end - start or 1.0)
    lines = []
    for rank in range(ranks):
        line = ["."] * width
        for span in (s for s in spans if s.rank == rank):
            left = int((span.begin - start) * scale)
            right = max(left + 1, int((span.end - start) * scale))
            sign = SIGNS[span.action.kind]
            text = f"{sign}{span.action.micro}".ljust(right - left, sign.lower())[: right - left]
            line[left:right] = text[: width - left]
        lines.append(f"{rank:3d} {''.join(line)}")
    return "\n".join(lines)
