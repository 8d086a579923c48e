"""Finds slow ranks: compares, periodically, how long each rank computes in a step.

Ranks end a step together, so their times per step are equal. What differs is how much of it each spends waiting for
the others in collectives: the slow one waits least. On a CPU a thread checks 20 times a second whether the training
thread is waiting (0.07 ms per check; hooks around collectives would keep them from overlapping). On a GPU the host runs
ahead and sees no waiting: there one step in eight, and its collectives, are timed by events on their own streams.

A rank is slow when it computes longer than the others by a wide margin in several comparisons in a row: a busy machine
delays different ranks at different times. Means over seconds are compared, and a rank with the median of the others.
"""

from __future__ import annotations

import linecache
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.observe.breakdown import Timer, Window
from shardwise.observe.metrics import Record

EVERY = 10.0  # seconds between comparisons
LOOKS = 0.05  # seconds between two looks at the training thread
ONE_IN = 8  # steps of which one is timed, on a GPU
SLOWER = 1.3  # times the others' median
SHARE = 0.1  # of a step that the others lose to it, at least
LEAST = 0.005  # seconds of a step: below that it is noise
IN_A_ROW = 3  # comparisons
FEWEST = 20  # looks that a comparison needs
WHOLE = "whole"  # a step, from its begin to its end on the device
_COLLECTIVES = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")


class Slow:
    """Detects slow ranks by their compute times; deterministic, so that all ranks reach the same verdict."""

    def __init__(self) -> None:
        self._row: dict[int, int] = {}
        self._told: set[int] = set()

    def hear(self, seconds: float, busy: list[float]) -> list[tuple[int, float, float]]:
        """From a step's time and each rank's compute time: newly slow ranks, their time and the others' median."""
        newly_slow = []
        for rank, own in enumerate(busy):
            usual = median(busy[:rank] + busy[rank + 1 :])
            late = own > SLOWER * usual and own - usual > max(LEAST, SHARE * seconds)
            self._row[rank] = self._row.get(rank, 0) + 1 if late else 0
            if self._row[rank] >= IN_A_ROW and rank not in self._told:
                self._told.add(rank)
                newly_slow.append((rank, own, usual))
        return newly_slow


@dataclass
class Pace:
    """Compute time of this rank, and its comparison with the others."""

    group: dist.ProcessGroup
    timer: Timer  # on a GPU it times collectives

    def __post_init__(self) -> None:
        self._size = dist.get_world_size(self.group)
        self._hosts: list[Any] = [None] * self._size
        if self._size > 1:
            dist.all_gather_object(self._hosts, socket.gethostname(), group=self.group)
        self._slow = Slow()
        by_timer = self.timer.by_events or isinstance(self.timer, SampledTimer)
        self._looks = WaitSampler() if self._size > 1 and not by_timer else None
        self._before = 0, 0.0, 0.0  # steps, seconds and waiting that a timer of every step had told of
        self._steps = 0
        self._seconds = 0.0
        self._began = 0.0
        self.waiting: float | None = None  # share of a step, by the last comparison

    def __enter__(self) -> Pace:
        if self._looks is not None:
            self._looks.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._looks is not None:
            self._looks.stop()

    def begin(self) -> None:
        """Marks the beginning of a step."""
        self._began = time.perf_counter()
        if self._looks is not None:
            self._looks.inside = True
        elif isinstance(self.timer, SampledTimer):
            self.timer.begin()

    def end(self) -> None:
        """Marks the end of a step's training: reports, evaluation and checkpoints do not count."""
        self._steps += 1
        self._seconds = self._seconds + time.perf_counter() - self._began
        if self._looks is not None:
            self._looks.inside = False
        elif isinstance(self.timer, SampledTimer):
            self.timer.end()

    def compare(self, step: int) -> list[Record]:
        """Collective over all ranks at the same step: returns newly slow ranks as records."""
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = 0, 0.0
        if self._size == 1:
            return []
        if self._looks is not None:
            seconds = seconds / max(1, steps)
            share = self._looks.share()
        else:
            seconds, share = self._timed()
        own = torch.tensor([seconds, -1.0 if share is None else share], dtype=torch.float64)
        everyone = torch.empty(self._size * 2, dtype=torch.float64)
        dist.all_gather_into_tensor(everyone, own, group=self.group)
        times, shares = everyone.view(-1, 2).T.tolist()
        if min(shares) < 0.0:
            return []  # somebody has seen too little
        self.waiting = share
        usual = median(times)
        busy = [(1.0 - waiting) * usual for waiting in shares]
        return [
            {
                "kind": "slow", "step": step, "rank": rank, "host": self._hosts[rank], "busy_seconds": round(own, 6),
                "others_seconds": round(others, 6), "time": time.time(),
            }
            for rank, own, others in self._slow.hear(usual, busy)
        ]  # fmt: skip

    def _timed(self) -> tuple[float, float | None]:
        """Seconds of a step by the device's clock (the host's is ahead of it), and the fraction spent waiting."""
        if isinstance(self.timer, SampledTimer):
            window = self.timer.sampled()
            steps = window.steps
            seconds = window.seconds.get(WHOLE, 0.0)
            waited = _waited(window)
        else:  # it times every step, for the log: what it has told since the last comparison
            total = self.timer.total
            before = self._before
            self._before = total.steps, total.whole, _waited(total)
            steps = total.steps - before[0]
            seconds = total.whole - before[1]
            waited = self._before[2] - before[2]
        return (seconds / steps, min(1.0, waited / seconds)) if steps and seconds > 0.0 else (0.0, None)


def _waited(window: Window) -> float:
    return sum(window.seconds.get(name, 0.0) for name in ("gather", "reduce"))


def describe_slow_rank(record: Record) -> str:
    """Message about a slow rank."""
    own, others = record["busy_seconds"], record["others_seconds"]
    return (
        f"step {record['step']}: rank {record['rank']} on {record['host']} is slow: it works {own:.3g} s on a step, "
        f"the others {others:.3g} s and then wait for it (seen {IN_A_ROW} times in a row). Often another job on its "
        "cores or device, a hot and throttled device, or slow storage for its data"
    )


class WaitSampler:
    """Thread that samples whether the main thread waits for other ranks."""

    def __init__(self) -> None:
        self.inside = False
        self._thread = threading.Thread(target=self._run, name="pace", daemon=True)
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._looked = self._waiting = 0
        self._known: dict[tuple[str, int], bool] = {}

    def start(self) -> None:
        self._main = threading.get_ident()  # whoever trains
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2)

    def share(self) -> float | None:
        """Fraction of samples in which it waited, since the last call; None if there were too few."""
        looked = self._looked
        waiting = self._waiting
        if looked < FEWEST:
            return None
        self._looked = self._waiting = 0
        return waiting / looked

    def _run(self) -> None:
        while not self._stop.wait(LOOKS):
            if self.inside:
                frame = sys._current_frames().get(self._main or 0)
                if frame is not None:
                    self._looked += 1
                    self._waiting += self._waits(frame)

    def _waits(self, frame: FrameType) -> bool:
        """Whether the innermost frame is a collective or waits for one."""
        place = (frame.f_code.co_filename, frame.f_lineno or 0)  # None between two lines
        if place not in self._known:
            line = linecache.getline(*place)
            self._known[place] = place[0].endswith(_COLLECTIVES) or ".wait(" in line or "wait_tensor(" in line
        return self._known[place]


class SampledTimer(Timer):
    """Timer that measures the collectives of one step in eight."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, breakdown=False, comms=False)
        self._number = 0
        self._sampling = False
        self._sampled = 0
        self._whole: AbstractContextManager[Any] = nullcontext()

    def begin(self) -> None:
        self._sampling = self._number % ONE_IN == 0
        if self._sampling:
            self._start()
            self._whole = super().region(WHOLE)
            self._whole.__enter__()

    def end(self) -> None:
        if self._sampling:
            self._whole.__exit__(None, None, None)
            self._sampled += 1
        self._number += 1
        self._sampling = False

    def sampled(self) -> Window:
        """The steps timed since the last call; waits for the last of them."""
        steps = self._sampled
        self._sampled = 0
        return self.flush(steps)

    def region(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()

    def collective(self, kind: str, size: int, ranks: int, part: str) -> AbstractContextManager[Any]:
        return super().collective(kind, size, ranks, part) if self._sampling else nullcontext()

    def meeting(self, ranks: int) -> AbstractContextManager[Any]:
        return super().meeting(ranks) if self._sampling else nullcontext()

    def annotate(self, records: list[Record]) -> list[Record]:
        return records

    def summary(self) -> list[str]:
        return []
