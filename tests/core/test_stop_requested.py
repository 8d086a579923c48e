"""A signal that comes at any moment of waiting is heard, and never waited for in vain."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

CODE = """
import signal
from shardwise.core.stop_requested import StopRequested
waited = StopRequested()
signal.signal(signal.SIGALRM, waited)
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
for _ in range(20_000):
    waited.wait(0.00001)
    waited.number = 0
signal.setitimer(signal.ITIMER_REAL, 0)
print("done")
"""


def test_no_moment_is_the_wrong_one() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "done\n", done.stderr


def test_it_is_waited_for() -> None:
    from shardwise.core.stop_requested import StopRequested

    asked, began = StopRequested(), time.monotonic()
    assert not asked.wait(0.12) and 0.1 < time.monotonic() - began < 5
    asked(signal.SIGTERM, None)
    assert asked and asked.wait(30) and asked.number == signal.SIGTERM and time.monotonic() - began < 10
