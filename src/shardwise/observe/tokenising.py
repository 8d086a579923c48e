"""Progress display of reading and tokenising: a bar per source, or occasional lines in a log.

It is written to standard error, so that the command's output stays clean.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from shardwise.core.printable import one_line
from shardwise.observe.progress import _duration, _mode, _rate

_PLAIN_INTERVAL = 10.0  # seconds between lines in a log
_MOST_BARS = 8
_WIDE = 70


class TokenisingProgress:
    """Displays the progress of each source; `SHARDWISE_PROGRESS` = plain, live or off overrides the detected mode.

    Use as a context manager; `update` is cheap and may be called for every chunk.
    """

    def __init__(self, names: Sequence[str], console: Console | None = None, interval: float = _PLAIN_INTERVAL) -> None:
        self._console = console or Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)
        self.mode = _mode(self._console)
        if self.mode == "live" and not self._console.is_terminal:
            self._console = Console(file=self._console.file, force_terminal=True, width=self._console.width)
        self._names = [one_line(name) for name in names]
        self._interval = interval
        self._begun: dict[int, float] = {}
        self._printed: dict[int, float] = {}
        self._tasks: dict[int, TaskID] = {}
        self._bars: Bars | None = None
        if self.mode == "live":
            wide = self._console.width >= _WIDE
            bar = BarColumn(bar_width=20 if wide else 8)
            self._bars = Bars(
                _Name(24 if wide else 12),
                bar,
                _Figures(self._console.width),
                console=self._console,
                transient=True,
                refresh_per_second=5,
            )

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def update(self, source_index: int, rows_done: int, rows_total: int | None, tokens: int) -> None:
        """Updates the progress of a source; `rows_total` is None if unknown."""
        if self.mode == "off":
            return
        now = time.monotonic()
        begun = self._begun.setdefault(source_index, now)
        if self._bars is None:
            last = self._printed.setdefault(source_index, now)
            finished = rows_total is not None and rows_done >= rows_total
            told_before = last != begun
            if now - last >= self._interval or (finished and told_before):
                self._printed[source_index] = now
                self._console.print(
                    Text(self._plain(source_index, rows_done, rows_total, tokens, now - begun)), soft_wrap=True
                )
            return
        if source_index not in self._tasks:
            self._tasks[source_index] = self._bars.add_task(self._names[source_index], visible=False, tokens=0)
        task = self._tasks[source_index]
        self._bars.update(task, completed=rows_done, total=rows_total, tokens=tokens)
        for place, task_shown in enumerate(sorted(self._bars.tasks, key=lambda t: (t.finished, t.id))):
            if task_shown.visible != (place < _MOST_BARS):  # those at work first
                self._bars.update(task_shown.id, visible=not task_shown.visible)

    def _plain(self, index: int, done: int, total: int | None, tokens: int, seconds: float) -> str:
        speed = done / seconds if seconds > 0 else 0.0
        left = f", {_duration((total - done) / speed)} left" if total is not None and speed > 0 else ""
        of = f" of {total:,}" if total is not None else ""
        return f"{self._names[index]}: {done:,}{of} rows, {_rate(speed)} rows/s, {_rate(tokens)} tokens{left}"


class _Name(ProgressColumn):
    """The name of a source, never parsed as markup."""

    def __init__(self, limit: int) -> None:
        super().__init__(Column(no_wrap=True))
        self._most = limit

    def render(self, task: Task) -> Text:
        name = Text(task.description)
        name.truncate(self._most, overflow="ellipsis")
        return name


class _Figures(ProgressColumn):
    """Rows, rows per second, tokens and the remaining time, as far as the width allows."""

    def __init__(self, width: int) -> None:
        super().__init__(Column(no_wrap=True))
        self._width = width

    def render(self, task: Task) -> Text:
        share = f"{task.percentage:3.0f}%" if task.total else f"{int(task.completed):,} rows"
        left = f"  ETA {_duration(task.time_remaining)}" if task.time_remaining is not None else ""
        if self._width < _WIDE:
            return Text(share + left, no_wrap=True)
        speed = f"  {_rate(task.speed)} rows/s" if task.speed else ""
        rows = f"  {int(task.completed):,} rows" if task.total else ""
        tokens = f"  {_rate(float(task.fields['tokens']))} tokens" if self._width >= 100 else ""
        return Text(share + rows + speed + tokens + left, no_wrap=True)
