"""A limit on how often a client may ask: a bucket per client that fills at an even pace and allows a minute's burst."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from shardwise.core.errors import UserError

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_FORGET = 10_000  # clients that are remembered; full buckets are dropped beyond that


def parse_rate(text: str) -> tuple[int, float]:
    """`60/min` as 60 requests in 60 seconds."""
    match = re.fullmatch(r"([1-9]\d*)\s*/\s*(s|sec|min|h)", text.strip())
    if match is None:
        raise UserError("--rate", text, "is no rate", "write e.g. 60/min, 5/s or 1000/h")
    return int(match[1]), _UNITS[match[2]]


class Rate:
    """`allow` says whether a client may ask now."""

    def __init__(self, count: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._count, self._pace, self._clock = float(count), count / seconds, clock
        self._left: dict[str, tuple[float, float]] = {}

    def allow(self, client: str) -> int:
        """0 if it may, else the seconds until it may."""
        now = self._clock()
        left, then = self._left.get(client, (self._count, now))
        left = min(self._count, left + (now - then) * self._pace)
        wait = 0 if left >= 1 else math.ceil((1 - left) / self._pace)
        self._left[client] = (left if wait else left - 1, now)
        if len(self._left) > _FORGET:
            full = [c for c, (n, t) in self._left.items() if n + (now - t) * self._pace >= self._count]
            for one in full:
                del self._left[one]
        return wait
