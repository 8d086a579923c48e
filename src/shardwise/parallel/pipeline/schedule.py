"""Orders of work in a pipeline as plain data: who computes which part of which micro-batch, and when.

A model is cut into chunks of consecutive blocks, numbered in the order of the forward; a rank owns one or several. An
order is a list of actions per rank. Nothing here computes: orders are checked and timed on paper before they are run.

[Note: any number of micro-batches] Actions of different micro-batches depend on one another only through the order on
each rank. So an order for many micro-batches with all actions of some taken out is still free of deadlocks: the orders
that want a multiple of the ranks, or at least so many, are made for more and cut down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwise.config.schema import Parallel

Style = Literal["gpipe", "1f1b", "interleaved", "zbv", "naive"]
Kind = Literal[
    "forward", "backward", "input", "weight"
]  # a backward is whole, or split into its two parts
SIGNS: dict[Kind, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}


class Action(NamedTuple):
    """One part of the model on one micro-batch."""

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
    """A style of order; `chunks` is how many parts of the model each rank owns."""

    style: Style
    chunks: int = 1

    def __post_init__(self) -> None:
        wanted = {"zbv": self.chunks == 2, "interleaved": self.chunks >= 1}.get(
            self.style, self.chunks == 1
        )
        if not wanted:
            raise ValueError(f"{self.style} does not go with {self.chunks} chunks per rank")

    @property
    def splits(self) -> bool:
        """Whether backwards are split into the part for the inputs and that for the weights."""
        return self.style == "zbv"

    def owners(self, ranks: int) -> tuple[int, ...]:
        """The rank of each chunk: round and round, or there and back (V)."""
        if self.style == "zbv":
            return (*range(ranks), *reversed(range(ranks)))
        return tuple(chunk % ranks for chunk in range(ranks * self.chunks))

    def orders(self, ranks: int, micros: int) -> Orders:
        """The actions of each rank for a step of `micros` micro-batches."""
        make = {
            "gpipe": _gpipe, "naive": _naive, "1f1b": _interleaved, "interleaved": _interleaved, "zbv": _zero_bubble,
        }[self.style]  # fmt: skip
        return tuple(
            tuple(one for one in make(rank, ranks, micros, self.chunks) if one.micro < micros)
            for rank in range(ranks)
        )


def schedule_of(parallel: Parallel) -> Schedule:
    """The order of work that settings ask for."""
    several = {"interleaved": parallel.virtual_stages or 2, "zbv": 2}
    return Schedule(parallel.pipeline_schedule, several.get(parallel.pipeline_schedule, 1))


def _gpipe(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    forwards = [Action("forward", rank, micro) for micro in range(micros)]
    return forwards + [Action("backward", rank, micro) for micro in range(micros)]


def _naive(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    return [
        Action(kind, rank, micro) for micro in range(micros) for kind in ("forward", "backward")
    ]


def _interleaved(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """Rounds of one micro-batch per rank through each chunk in turn; with one chunk this is 1F1B."""
    rounds = -(-micros // ranks)
    steps = [
        (chunk, lap * ranks + i)
        for lap in range(rounds)
        for chunk in range(chunks)
        for i in range(ranks)
    ]
    forwards = [Action("forward", chunk * ranks + rank, micro) for chunk, micro in steps]
    backwards = [
        Action("backward", (chunks - 1 - chunk) * ranks + rank, micro) for chunk, micro in steps
    ]
    ahead = (ranks - 1 - rank) * (1 if chunks == 1 else 2) + (chunks - 1) * ranks
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for i, forward in enumerate(forwards[ahead:]):
        order += [forward, backwards[i]]
    return order + backwards[len(forwards) - ahead :]


def _zero_bubble(rank: int, ranks: int, micros: int, chunks: int) -> list[Action]:
    """Zero-bubble V (Qi et al. 2024): weights wait until nothing else is to be done."""
    micros = max(micros, 2 * ranks - 1)
    near, far = (
        rank,
        2 * ranks - 1 - rank,
    )  # this rank's chunks on the way there and on the way back
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
    """What must be done before an action, on whatever rank."""
    kind, chunk, micro = action
    if kind == "forward":
        return [Action("forward", chunk - 1, micro)] if chunk else []
    if kind == "weight":
        return [Action("input", chunk, micro)]
    after = (
        [Action("input" if splits else "backward", chunk + 1, micro)] if chunk + 1 < chunks else []
    )
    return [Action("forward", chunk, micro), *after]


def check_orders(schedule: Schedule, ranks: int, micros: int) -> None:
    """Every action once, on its owner, and no rank waits for ever; a ValueError says what is wrong."""
    owners, orders = schedule.owners(ranks), schedule.orders(ranks, micros)
    kinds: tuple[Kind, ...] = (
        ("forward", "input", "weight") if schedule.splits else ("forward", "backward")
    )
    for rank, order in enumerate(orders):
        mine = [chunk for chunk, owner in enumerate(owners) if owner == rank]
        wanted = {
            Action(kind, chunk, micro)
            for kind in kinds
            for chunk in mine
            for micro in range(micros)
        }
        if len(order) != len(wanted) or set(order) != wanted:
            raise ValueError(
                f"rank {rank} of {ranks} does not do each of its actions once: {schedule}"
            )
    simulate(schedule, ranks, micros, lambda _: 1.0)


def simulate(
    schedule: Schedule, ranks: int, micros: int, seconds: Callable[[Action], float]
) -> list[ActionSpan]:
    """When each action would run if it took so long and messages took no time."""
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
    """The share of the ranks' time from the first action to the last in which they did nothing."""
    if not spans:
        return 0.0
    whole = ranks * (max(s.end for s in spans) - min(s.begin for s in spans))
    return 1 - sum(s.end - s.begin for s in spans) / whole if whole else 0.0


def picture(spans: Sequence[ActionSpan], ranks: int, width: int = 100) -> str:
    """A line per rank: the sign of an action and its micro-batch where it ran, dots where nothing did."""
    if not spans:
        return ""
    start, end = min(s.begin for s in spans), max(s.end for s in spans)
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
