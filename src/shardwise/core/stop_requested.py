"""Records whether a signal has asked this process to stop."""

from __future__ import annotations

import time
from types import FrameType

LOOKS = 0.05  # seconds between two looks


class StopRequested:
    """A signal handler that sets a flag, which can be waited for.

    Not a threading.Event: a handler runs in the main thread, between any two of its instructions. One that sets the
    event which that thread is just about to wait for finds its lock taken, by itself, and never returns.
    """

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = number

    def __bool__(self) -> bool:
        return self.number != 0

    def wait(self, seconds: float) -> bool:
        """Waits until a stop is requested, at most `seconds`; returns whether it was."""
        end = time.monotonic() + seconds
        while not self and (left := end - time.monotonic()) > 0.0:
            time.sleep(min(LOOKS, left))
        return bool(self)
