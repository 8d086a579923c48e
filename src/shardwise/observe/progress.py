"""Progress display of a run: one live line on a terminal, plain lines anywhere else.

The live line must be calm: its columns have fixed widths and come and go with the terminal's width only, never with
the values, so that nothing jumps when a loss gains a digit.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from shardwise.core.errors import UserError
from shardwise.observe.metrics import Record

_GAP = 2
_BAR_WIDTHS = (8, 30)
_BAR_RANK = 4
_PLAIN_INTERVAL = 1.0  # seconds between plain lines: a log of a fast run stays readable
_MEAN_WEIGHT = 0.9  # of the past in the running mean that colours the loss: about the last ten steps


@dataclass(frozen=True)
class _LineColumn:
    """One column of the line; the columns with the highest rank are dropped first on a narrow terminal."""

    key: str
    rank: int
    width: int  # of the value alone
    before: str
    after: str
    show: Callable[[float], str]


class Progress:
    """Displays training records; `SHARDWISE_PROGRESS` = plain, live or off overrides the detected mode."""

    def __init__(
        self, total_steps: int, first_step: int = 0, refresh: float = 0.2, console: Console | None = None
    ) -> None:
        # FORCE_COLOR makes rich take a pipe for a terminal; a log file must still get plain lines.
        console = console or Console(force_terminal=None if sys.stdout.isatty() else False)
        self.mode = _mode(console)
        if self.mode == "live" and not console.is_terminal:
            console = Console(file=console.file, force_terminal=True, width=console.width, no_color=console.no_color)
        self._console = console
        self._total, self._first = total_steps, first_step
        self._record: Record | None = None
        self._received = self._started = time.monotonic()
        self._seen: set[str] = set()
        self._by_source: dict[str, float | None] = {}
        self._mean: float | None = None
        self._loss_style = ""
        self._printed_at = -math.inf
        self._pending = False
        self._live: Live | None = None
        if self.mode == "live":
            self._live = Live(self, console=console, refresh_per_second=1 / refresh)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        elif self.mode == "plain" and self._pending:
            self._print_plain()

    def update(self, record: Record) -> None:
        """Displays a training record."""
        self._color_loss(_number(record.get("loss")))
        self._seen.update(key for key, value in record.items() if value is not None)
        self._by_source |= {name: _number(value) for name, value in (record.get("losses") or {}).items()}
        self._received = time.monotonic()
        self._record, self._pending = record, True
        due = self._received - self._printed_at >= _PLAIN_INTERVAL or record["step"] >= self._total
        if self.mode == "plain" and due:
            self._print_plain()

    def evaluated(self, record: Record) -> None:
        """Prints an evaluation record above the line."""
        line = Text(f"step {record['step']}  evaluation", style="bold" if self.mode == "live" else "")
        for key, figure in record.items():  # loss, perplexity, and what the objective tells: an accuracy, a margin
            if key not in ("step", "time") and (value := _number(figure)) is not None:
                line.append(f"  {key} {_six(value)}")
        losses = {name: _number(value) for name, value in (record.get("losses") or {}).items()}
        if losses:
            line.append("  (" + ", ".join(f"{n} {'-' if v is None else _six(v)}" for n, v in losses.items()) + ")")
        self._print(line)

    def note(self, text: str) -> None:
        """Prints a message above the line."""
        self._print(Text(text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The last column stays free: some terminals wrap as soon as it is written.
        yield self._line(options.max_width - 1, options.ascii_only)

    def _print(self, text: Text) -> None:
        if self.mode == "plain" and self._pending:
            self._print_plain()  # else the log would tell of an evaluation before the step that it follows
        if self.mode != "off":
            self._console.print(text, soft_wrap=self.mode == "plain")

    def _print_plain(self) -> None:
        self._pending = False
        self._printed_at = time.monotonic()
        cells = [cell for _, cell in self._cells()]
        self._console.print(Text("step " + "  ".join(cell.plain.rstrip() for cell in cells)), soft_wrap=True)

    def _color_loss(self, loss: float | None) -> None:
        """Picks the colour of the loss against its running mean, then updates the mean."""
        if loss is None:
            self._loss_style = ""
        elif not math.isfinite(loss):
            self._loss_style = "bold red"
        elif self._mean is None:
            self._mean, self._loss_style = loss, ""
        else:
            self._loss_style = "green" if loss < self._mean else ""
            if loss > self._mean:
                self._loss_style = "yellow"
            self._mean = _MEAN_WEIGHT * self._mean + (1 - _MEAN_WEIGHT) * loss

    def _step(self) -> int:
        return self._first if self._record is None else int(self._record["step"])

    def _values(self) -> Record:
        """The latest record with its clocks advanced, so that the line moves during a long step."""
        if self._record is None:
            return {}
        since = time.monotonic() - self._received if self.mode == "live" else 0.0
        values = dict(self._record)
        elapsed, left = _number(values.get("elapsed_seconds")), _number(values.get("eta_seconds"))
        values["elapsed_seconds"] = (self._received - self._started if elapsed is None else elapsed) + since
        values["eta_seconds"] = None if left is None else max(0.0, left - since)
        return values

    def _cells(self) -> list[tuple[int, Text]]:
        """The columns that have a value, each with its rank and padded to its fixed width."""
        width = len(str(self._total))
        cells = [(0, Text(f"{self._step():>{width}}/{self._total}", style="bold" if self.mode == "live" else ""))]
        if self._record is None:
            return [*cells, (1, Text("starting"))]
        values = self._values()
        for column in _COLUMNS:
            if column.key not in self._seen and column.key != "elapsed_seconds":
                continue  # an MFU on a device of unknown peak, for one, never comes
            value = _number(values.get(column.key))
            text = "-" if value is None else column.show(value)
            cell = Text()
            cell.append(column.before, style="dim").append(
                text, style=self._loss_style if column.key == "loss" else ""
            ).append(column.after, style="dim")
            cell.append(" " * (column.width - len(text)))
            cells.append((column.rank, cell))
        for rank, (name, value) in enumerate(self._by_source.items(), max(c.rank for c in _COLUMNS) + 1):
            text = "-" if value is None else _six(value)
            cells.append((rank, Text(f"{_short(name)} ", style="dim").append(f"{text:<6}", style="default")))
        return cells

    def _line(self, room: int, ascii_only: bool) -> Text:
        """The live line: as many columns as fit, by rank, and a bar in the remaining room."""
        cells = self._cells()
        widths = {rank: cell.cell_len for rank, cell in cells} | {_BAR_RANK: _BAR_WIDTHS[0]}
        fitting: set[int] = set()
        used = -_GAP
        for rank in sorted(widths):
            if used + _GAP + widths[rank] <= room:
                used += _GAP + widths[rank]
                fitting.add(rank)
        parts = [cell for rank, cell in cells if rank in fitting]
        if _BAR_RANK in fitting:
            parts.insert(0, self._bar(min(_BAR_WIDTHS[1], _BAR_WIDTHS[0] + room - used), ascii_only))
        line = Text(" " * _GAP).join(parts)
        line.no_wrap, line.overflow = True, "crop"
        line.truncate(max(room, 1), overflow="crop")
        return line

    def _bar(self, width: int, ascii_only: bool) -> Text:
        done = min(width, round(width * self._step() / max(self._total, 1)))
        full, rest = ("#", "-") if ascii_only else ("━", "─")  # two shapes: the bar reads without colour too
        return Text(full * done, style="cyan").append(rest * (width - done), style="dim")


def _mode(console: Console) -> str:
    mode = os.environ.get("SHARDWISE_PROGRESS", "")
    if mode not in ("", "plain", "live", "off"):
        raise UserError("SHARDWISE_PROGRESS", mode, "unknown mode", "set it to plain, live or off, or leave it unset")
    if mode in ("plain", "off"):
        return mode
    # A dumb terminal cannot move its cursor, so not even `live` can be had there.
    if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return "plain"
    return "live" if mode == "live" or console.is_terminal else "plain"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _scientific(value: float, digits: int = 1) -> str:
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent and value else f"{value:g}"


def _six(value: float) -> str:
    """Formats a number in at most six characters."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if size < 1e-3 or size >= 99999.5:
        return _scientific(value)
    return f"{value:.{max(0, 4 - max(0, math.floor(math.log10(size))))}f}"[:6].rstrip(".")


def _four(value: float) -> str:
    """Formats a number in about four characters."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if 0.01 <= abs(value) < 999.5:
        return f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
    return _scientific(value, digits=0)


def _short(name: str) -> str:
    """Shortens a source's name to 12 characters, keeping the end, where file names differ."""
    return name[-12:]


def _rate(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _gibibytes(value: float) -> str:
    size = value / 2**30
    if size < 10:
        return f"{size:.2f}"
    return f"{size:.1f}" if size < 1000 else f"{size:.0f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    rounded = round(seconds)
    minutes = rounded // 60
    hours = rounded // 3600
    days = rounded // 86400
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m{rounded % 60:02}s" if minutes else f"{rounded}s"


_COLUMNS = (
    _LineColumn("loss", 1, 6, "loss ", "", _six),
    _LineColumn("learning_rate", 5, 6, "lr ", "", _scientific),
    _LineColumn("grad_norm", 6, 4, "grad ", "", _four),
    _LineColumn("tokens_per_second", 3, 5, "", " tok/s", _rate),
    _LineColumn("mfu", 7, 5, "MFU ", "", lambda value: f"{value:.1%}"),
    _LineColumn("memory_bytes", 8, 5, "", " GiB", _gibibytes),
    _LineColumn("elapsed_seconds", 9, 6, "elapsed ", "", _duration),
    _LineColumn("eta_seconds", 2, 6, "ETA ", "", _duration),
    _LineColumn("cross_entropy", 10, 6, "entropy ", "", _six),
    _LineColumn("aux_loss", 11, 6, "aux ", "", _six),
    _LineColumn("z_loss", 12, 6, "z ", "", _six),
)
