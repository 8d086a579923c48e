"""Rate limit per client: a token bucket that refills evenly and allows a burst of one period."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from shardwise.core.errors import UserError

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_FORGET = 10_000  # clients that are remembered; full buckets are dropped beyond that


def parse_rate(text: str) -> tuple[int, float]:
    """Parses `60/min` into 60 requests in 60 seconds."""
    match = re.fullmatch(r"([1-9]\d*)\s*/\s*(s|sec|min|h)", text.strip())
    if match is None:
        raise UserError("--rate", text, "is no rate", "write e.g. 60/min, 5/s or 1000/h")
    return int(match[1]), _UNITS[match[2]]


class Rate:
    """Token-bucket rate limit per client."""

    def __init__(self, count: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._count = float(count)
        self._pace = count / seconds
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def allow(self, client: str) -> int:
        """Returns 0 if the client may send a request now, else the seconds until it may."""
        now = self._clock()
        tokens, last_seen = self._left.get(client, (self._count, now))
        tokens = min(self._count, tokens + (now - last_seen) * self._pace)
        wait = 0 if tokens >= 1 else math.ceil((1 - tokens) / self._pace)
        self._left[client] = (tokens if wait else tokens - 1, now)
        if len(self._left) > _FORGET:
            full = [c for c, (n, t) in self._left.items() if n + (now - t) * self._pace >= self._count]
            for idle in full:
                del self._left[idle]
        return wait
