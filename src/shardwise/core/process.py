"""State and termination of rank processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from types import FrameType
from typing import NoReturn

import psutil


def leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def die_with_parent(parent: int) -> None:
    """Asks the kernel (Linux) to end this rank if the supervisor is killed, so that none is orphaned."""
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before we could ask
        os._exit(1)


def process_state(process: int) -> str:
    """Whether a process on this host is "stopped" or "gone"; "" if neither."""
    try:
        status = psutil.Process(process).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status == "zombie":
        return "gone"
    return status if status == "stopped" else ""
