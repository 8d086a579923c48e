"""Progress of a measurement: a bar on a terminal, a line now and then in a log; on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.observe.progress import _mode

INTERVAL = 10.0  # seconds between lines in a log

Bar = Callable[[int], Callable[[int], None]]


@contextmanager
def bars(text: str) -> Iterator[Bar]:
    """Yields `bar(total)`, which starts a bar and returns a function to advance it; see `SHARDWISE_PROGRESS`."""
    console = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
    mode = _mode(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=mode != "live") as progress:

        def bar(total: int) -> Callable[[int], None]:
            if mode == "plain":
                return _lines(text, total)
            number = progress.add_task(text, total=total)
            return lambda count: progress.advance(number, count)

        yield bar


def _lines(text: str, total: int) -> Callable[[int], None]:
    done = 0
    last_printed = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last_printed
        done += count
        if time.monotonic() - last_printed >= INTERVAL:
            last_printed = time.monotonic()
            print(f"{text}: {done} of {total}", file=sys.stderr, flush=True)

    return advance
