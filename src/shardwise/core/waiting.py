"""Rate limit for messages about waiting: not at once, and at growing intervals."""

from __future__ import annotations

import time

FIRST = 5.0  # seconds until the first word


LONGEST = 300.0  # seconds between later ones, each time twice as many


class WaitReporter:
    """Says when to report again: some seconds after the wait began or changed, then at growing intervals."""

    def __init__(self) -> None:
        self._about: object = None
        self._pause = FIRST
        self._next = 0.0

    def due(self, about: object, now: float | None = None) -> bool:
        """Whether to report now; `about` is the message without its time."""
        now = time.monotonic() if now is None else now
        if self._about is None or about != self._about:
            new = self._about is None
            self._about, self._pause = about, FIRST
            self._next = now + FIRST if new else min(self._next, now + FIRST)
            return False
        if now < self._next:
            return False
        self._pause = min(self._pause * 2, LONGEST)
        self._next = now + self._pause
        return True

    def over(self) -> None:
        """Resets it at the end of a wait."""
        self._about = None
