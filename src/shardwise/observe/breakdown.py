"""Time per part of a step, and traffic per kind of collective, measured without a device sync.

On a GPU a region is a pair of events, read when it is time to report; on a CPU it is the host's clock. The parts of the
step (data, forward, backward, step) follow one another, and what is between them is "other". What runs inside or beside
them (gather, reduce, offload) is reported separately and not added: on a GPU it overlaps with computing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.observe.metrics import Record

PARTS = ("data", "forward", "backward", "step")
PIPELINED = ("data", "pipeline", "step")  # where forwards and backwards of several micro-batches take turns
BESIDE = ("gather", "reduce", "offload")
# What crosses each link, as a share of the message that the caller sees, in the ring that moves least (n ranks).
BUS: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}


@dataclass
class CollectiveCalls:
    """Calls of one kind of collective: their number, message bytes, and seconds."""

    ranks: int
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def record(self, kind: str) -> dict[str, float]:
        """As a record, with bandwidths in GB/s: algorithm bandwidth and bus bandwidth."""
        algorithm = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        bus = algorithm * BUS[kind](self.ranks) if kind in BUS else algorithm
        return {
            "ranks": self.ranks, "calls": self.calls, "bytes": self.bytes, "seconds": round(self.seconds, 6),
            "algorithm_gb_per_second": round(algorithm, 4), "bus_gb_per_second": round(bus, 4),
        }  # fmt: skip


@dataclass
class Window:
    """Measurements over some steps, on this rank."""

    steps: int = 0
    whole: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[tuple[str, int], CollectiveCalls] = field(default_factory=dict)

    def add(self, other: Window) -> None:
        """Adds another window's measurements."""
        self.steps, self.whole = self.steps + other.steps, self.whole + other.whole
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        for key, calls in other.calls.items():
            totals = self.calls.setdefault(key, CollectiveCalls(calls.ranks))
            totals.calls, totals.bytes = totals.calls + calls.calls, totals.bytes + calls.bytes
            totals.seconds += calls.seconds

    def breakdown(self) -> dict[str, float]:
        """Seconds per step: the total, its parts and the rest, then what overlaps with them."""
        steps = max(1, self.steps)
        names = PIPELINED if "pipeline" in self.seconds else PARTS
        parts = {name: self.seconds.get(name, 0.0) / steps for name in names}
        step_seconds = self.whole / steps
        beside = {name: self.seconds[name] / steps for name in BESIDE if name in self.seconds}
        figures = {"whole": step_seconds} | parts | {"other": max(0.0, step_seconds - sum(parts.values()))} | beside
        return {name: round(seconds, 6) for name, seconds in figures.items()}

    def comms(self) -> dict[str, Any]:
        """Each kind of collective over this window; kinds used in groups of several sizes are listed per size."""
        kinds = [kind for kind, _ in self.calls]
        by_kind = {k if kinds.count(k) == 1 else f"{k}/{n}": c.record(k) for (k, n), c in sorted(self.calls.items())}
        return {"steps": self.steps} | by_kind


class Timer:
    """Times regions of a step; `annotate` adds the results to training records."""

    on = True

    def __init__(self, device: torch.device, breakdown: bool = True, comms: bool = True) -> None:
        self._breakdown, self._comms = breakdown, comms
        self.by_events = device.type == "cuda"  # the host runs ahead of the device and sees no waiting
        self._began: float | None = None
        self._pending: deque[_Span] = deque()
        self._window = Window()
        self.total = Window()

    def region(self, name: str) -> AbstractContextManager[Any]:
        """Context that counts as `name`; may be entered any number of times per step."""
        return _Span(self, name, None)

    def collective(self, kind: str, size: int, ranks: int, part: str) -> AbstractContextManager[Any]:
        """Context of one collective on the current stream: `size` is its message in bytes, `part` its category."""
        if ranks == 1:
            return _NOTHING
        return _Span(self, part, (kind, size, ranks))

    def meeting(self, ranks: int) -> AbstractContextManager[Any]:
        """Context that mostly waits for other ranks and moves little data: counts as reduce."""
        return _NOTHING if ranks == 1 else _Span(self, "reduce", None)

    def flush(self, steps: int) -> Window:
        """Measurements since the last flush, over `steps` steps; waits for the device."""
        while self._pending:
            self._pending.popleft().settle(wait=True)
        window = self._window
        self._window = Window()
        window.steps = steps
        window.whole = time.perf_counter() - self._began if self._began is not None else 0.0
        self._began = None
        self.total.add(window)
        return window

    def annotate(self, records: list[Record]) -> list[Record]:
        """Adds the measurements of these records' steps to the last of them."""
        if records:
            window = self.flush(len(records))
            records[-1] |= {"breakdown": window.breakdown()} if self._breakdown else {}
            records[-1] |= {"comms": window.comms()} if self._comms else {}
        return records

    def summary(self) -> list[str]:
        """Summary of the full run in a few lines, for the terminal."""
        lines = breakdown_table(self.total) if self._breakdown else []
        return lines + (comms_table(self.total) if self._comms else [])

    def _start(self) -> None:
        if self._began is None:
            self._began = time.perf_counter()
        # Spans that are done are taken in at no cost: the queue must not grow with the steps between two reports.
        while self._pending and self._pending[0].settle(wait=False):
            self._pending.popleft()

    @property
    def is_inside(self) -> bool:
        """Whether a step has begun since the last flush: evaluation's gathers are not part of training."""
        return self._began is not None

    def _settled(self, name: str, call: tuple[str, int, int] | None, seconds: float) -> None:
        window = self._window
        window.seconds[name] = window.seconds.get(name, 0.0) + seconds
        if call is not None:
            kind, size, ranks = call
            calls = window.calls.setdefault((kind, ranks), CollectiveCalls(ranks))
            calls.calls += 1
            calls.bytes += size
            calls.seconds += seconds


class _Span:
    """One region: two events on the current stream, or two readings of the clock."""

    __slots__ = ("_begin", "_call", "_end", "_name", "_timer")

    def __init__(self, timer: Timer, name: str, call: tuple[str, int, int] | None) -> None:
        self._timer = timer
        self._name = name
        self._call = call
        self._begin: Any = None
        self._end: Any = None

    def __enter__(self) -> None:
        if self._name in (*PARTS, *PIPELINED):
            self._timer._start()
        self._begin = self._now() if self._timer.is_inside else None

    def __exit__(self, *_: object) -> None:
        if self._begin is None:
            return
        self._end = self._now()
        if self._timer.by_events:
            self._timer._pending.append(self)
        else:
            self._timer._settled(self._name, self._call, self._end - self._begin)

    def _now(self) -> Any:
        if not self._timer.by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self, wait: bool) -> bool:
        """Reads the events if they have completed, or waits for them."""
        if wait:
            self._end.synchronize()
        elif not self._end.query():
            return False
        self._timer._settled(self._name, self._call, self._begin.elapsed_time(self._end) / 1e3)
        return True


class _Off(Timer):
    """Timer that measures nothing and costs nothing."""

    on = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), breakdown=False, comms=False)

    def region(self, name: str) -> AbstractContextManager[Any]:
        return _NOTHING

    def collective(self, kind: str, size: int, ranks: int, part: str) -> AbstractContextManager[Any]:
        return _NOTHING

    def meeting(self, ranks: int) -> AbstractContextManager[Any]:
        return _NOTHING

    def annotate(self, records: list[Record]) -> list[Record]:
        return records


_NOTHING = nullcontext()
OFF: Timer = _Off()


def timer_for(device: torch.device, breakdown: bool, comms: bool) -> Timer:
    """Returns a timer for the enabled reports; one that does nothing if none is enabled."""
    return Timer(device, breakdown, comms) if breakdown or comms else OFF


def breakdown_line(breakdown: dict[str, float]) -> str:
    """One log line: the step and its parts in milliseconds."""
    parts = [f"{name} {1e3 * seconds:.1f}" for name, seconds in breakdown.items() if name != "whole"]
    return f"{1e3 * breakdown['whole']:.1f} ms a step: " + ", ".join(parts)


def breakdown_table(window: Window) -> list[str]:
    """Table of milliseconds per step and shares."""
    figures = window.breakdown()
    step_seconds = figures.pop("whole")
    lines = [f"time per step, mean of {window.steps} steps on this rank: {1e3 * step_seconds:.1f} ms"]
    for name, seconds in figures.items():
        share = seconds / step_seconds if step_seconds else 0.0
        note = "  (inside or beside the above)" if name in BESIDE else ""
        lines.append(f"  {name:<10}{1e3 * seconds:>10.1f} ms {share:>6.1%}{note}")
    return lines


def comms_table(window: Window) -> list[str]:
    """Table with a row for each kind of collective."""
    lines = [f"collectives of this rank over {window.steps} steps"]
    lines.append(f"  {'kind':<16}{'ranks':>6}{'calls':>9}{'GB':>10}{'ms':>11}{'GB/s':>9}{'bus GB/s':>10}")
    for (kind, ranks), calls in sorted(window.calls.items()):
        r = calls.record(kind)
        lines.append(
            f"  {kind:<16}{ranks:>6}{calls.calls:>9}{calls.bytes / 1e9:>10.3f}{1e3 * calls.seconds:>11.1f}"
            f"{r['algorithm_gb_per_second']:>9.2f}{r['bus_gb_per_second']:>10.2f}"
        )
    return lines if len(lines) > 2 else [*lines[:1], "  none: one rank talks to nobody"]
