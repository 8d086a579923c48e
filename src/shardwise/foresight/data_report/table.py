"""The bill in the terminal: a table of the sources that fits any width, then what is odd about them, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.core.errors import UserError
from shardwise.core.printable import counted, one_line, several_lines
from shardwise.data.statistics import DataStatistics, SourceStatistics, coarse, read_fates
from shardwise.foresight.data_report.advice import Notice

LISTED = 20  # rows named per source; the others are in the file
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#@"
_GAP = 2
_LEAST_NAME, _MOST_NAME = 10, 40
_FIRST = 3  # the ranks for which a long name is broken
_MOST_REASON = 160


@dataclass(frozen=True)
class _TableColumn:
    """One column of the table; those of the highest rank come last on a narrow terminal."""

    title: str
    rank: int
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(cell_len, [self.title, *self.cells])) + _GAP


def print_bill(bill: DataStatistics, console: Console) -> None:
    """The table, the sources one by one, the packing and the rows that did not go in as they are."""
    template = f", template {one_line(bill.template)}" if bill.template else ""
    _print(console, f"tokenizer {one_line(bill.tokenizer)}{template}", "dim")
    for title, sources in (("training data", bill.train), ("evaluation data", bill.eval)):
        if sources:
            console.print()
            for table in _tables(title, sources, console.width, mixture=sources is bill.train):
                console.print(table)
    console.print()
    for source in bill.sources:
        _print_source(source, console)
    _print(console, _packing_line(bill))
    if bill.steps is not None:
        _print(console, f"{counted(bill.steps.steps, 'step', 'steps')}: {bill.steps.words}")
    for source in bill.sources:
        _print_fates(source, console)


def print_notices(found: Sequence[Notice], console: Console) -> None:
    """What looks wrong, one paragraph each."""
    for notice in found:
        line = Text("warning: ", style="bold yellow")
        line.append(f"{one_line(notice.source)}: " if notice.source else "", style="not bold default")
        line.append(several_lines(notice.text), style="not bold default")
        console.print(line, soft_wrap=not console.is_terminal, highlight=False)


def print_problems(found: Sequence[UserError], console: Console) -> None:
    """What would fail the run, all of it."""
    for error in found:
        line = Text("error: ", style="bold red")
        line.append(several_lines(error), style="not bold default")
        console.print(line, soft_wrap=True, highlight=False)


def _tables(title: str, sources: list[SourceStatistics], width: int, mixture: bool) -> Iterator[Table]:
    """All columns: what one table has no room for goes on in another below it."""
    several = len(sources) > 1
    shares = [s.learned_share for s in sources] + ([SourceTotals(sources).learned_share] if several else [])
    names = [one_line(s.name) for s in sources] + (["all"] if several else [])
    columns = [
        _TableColumn("rows", 3, _counts([s.rows for s in sources], several)),
        _TableColumn("documents", 6, _counts([s.documents for s in sources], several)),
        _TableColumn("tokens", 1, _counts([s.tokens for s in sources], several)),
        _TableColumn("learned", 2, [_share(share) for share in shares]),
        _TableColumn("left out", 5, _counts([s.left_out for s in sources], several)),
        _TableColumn("median", 8, [f"{s.percentile(0.5):,}" for s in sources]),
        _TableColumn("99%", 7, [f"{s.percentile(0.99):,}" for s in sources]),
        _TableColumn("longest", 9, [f"{s.longest or s.percentile(1.0):,}" for s in sources]),
        _TableColumn("tokens/s", 10, ["cached" if s.cached else _rate(s.tokens_per_second) for s in sources]),
    ]
    if mixture and several:
        columns.insert(4, _TableColumn("mixture", 4, [_share(s.share) for s in sources]))
    if any(s.held_out for s in sources):
        columns.insert(2, _TableColumn("held out", 11, _counts([s.held_out for s in sources], several)))
    first = sum(entry.width for entry in columns if entry.rank <= _FIRST)
    wanted = min(max(map(cell_len, names)), _MOST_NAME, width - first - _GAP)
    room = width - max(_LEAST_NAME, wanted) - _GAP
    while columns:
        kept, left = set[int](), room
        for entry in sorted(columns, key=lambda c: c.rank):
            if entry.width > left and kept:
                break
            left -= entry.width
            kept.add(entry.rank)
        chosen = [entry for entry in columns if entry.rank in kept]
        yield _table(title, names, chosen, len(sources))
        columns, title = [entry for entry in columns if entry.rank not in kept], ""


def _table(title: str, names: list[str], columns: list[_TableColumn], sources: int) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column("source", overflow="fold", min_width=_LEAST_NAME)
    for entry in columns:
        table.add_column(entry.title, justify="right", no_wrap=True)
    for row, name in enumerate(names):
        cells = [Text(entry.cells[row] if row < len(entry.cells) else "") for entry in columns]
        table.add_row(Text(name), *cells, style="bold" if row == sources else "")
    return table


class SourceTotals:
    """Sums over sources."""

    def __init__(self, sources: Sequence[SourceStatistics]) -> None:
        self.rows = sum(s.rows for s in sources)
        self.documents = sum(s.documents for s in sources)
        self.tokens = sum(s.tokens for s in sources)
        self.supervised = sum(s.supervised for s in sources)
        self.learned_share = self.supervised / self.tokens if self.tokens else 0.0


def _counts(values: list[int], several: bool) -> list[str]:
    return [f"{value:,}" for value in [*values, *([sum(values)] if several else [])]]


def _share(share: float) -> str:
    return f"{share:.1%}"


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _print_source(source: SourceStatistics, console: Console) -> None:
    line = Text(one_line(source.name), style="bold")
    line.append(f"  {one_line(source.understood)}", style="not bold")
    console.print(line, soft_wrap=not console.is_terminal, highlight=False)
    ascii_only = console.options.ascii_only
    if bars := sparkline(source.lengths, max(8, min(32, console.width - 24)), ascii_only):
        low = coarse(source.lengths, 1)[0][0]
        longest = source.longest or source.percentile(1.0)
        _print(console, f"  rows by tokens  {low:,} {bars} {longest:,}")
    if source.held_out:
        _print(console, f"  held out for evaluation: {source.held_out:,} of its rows")
    if source.epochs is not None or source.weight != 1.0 or source.passes != 1.0:
        _print(console, f"  {source.mixed_by}: each row comes up {source.passes:.3g} times in an epoch of the run")


def sparkline(lengths: Sequence[int], width: int, ascii_only: bool = False) -> str:
    """A histogram in one line; its axis is by doublings, and a bar that is not empty is never invisible."""
    bars = coarse(lengths, width)
    most = max((count for _, _, count in bars), default=0)
    signs = _ASCII_BARS if ascii_only else _BARS
    return "".join(signs[-(-count * len(signs) // most) - 1] if count else " " for _, _, count in bars)


def _packing_line(bill: DataStatistics) -> str:
    packing = bill.packing
    if not packing.on:
        return (
            f"no packing: {counted(packing.sequences, 'sequence', 'sequences')} of one document, of up to "
            f"{packing.sequence_length:,} tokens"
        )
    return (
        f"packing: {counted(packing.sequences, 'sequence', 'sequences')} of {packing.sequence_length:,} tokens, "
        f"{packing.efficiency:.1%} "
        f"full ({packing.padding:,} tokens of padding), {packing.documents_per_sequence:.1f} documents in each, chosen "
        f"from {packing.window:,} at a time"
    )


def _print_fates(source: SourceStatistics, console: Console) -> None:
    """The rows that did not go in as they are, by place."""
    if not any(source.fates.values()):
        return
    console.print()
    counts = ", ".join(f"{count:,} {one_line(fate)}" for fate, count in source.fates.items() if count)
    _print(console, f"{one_line(source.name)}: {counts}", "bold")
    if source.fates_file is None:
        return
    rows = read_fates(source.fates_file, LISTED, source.fates)
    left, listed = LISTED, 0
    for index, (fate, places) in enumerate(rows.items()):
        # Every fate gets its part of the room, so that one that is frequent does not hide the others.
        for where, reason in places[: max(1, left // (len(rows) - index))]:
            why = f" ({clipped(one_line(reason))})" if reason else ""
            _print(console, f"  {one_line(fate)}: {one_line(where)}{why}")
            left, listed = left - 1, listed + 1
    more = sum(source.fates.values()) - listed
    begin = f"and {more:,} more; all of them" if more > 0 else "also"
    _print(console, f"  {begin} in {one_line(source.fates_file)}", "dim")


def clipped(text: str, most: int = _MOST_REASON) -> str:
    """A reason that quotes a row may be as long as the row."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _print(console: Console, text: str, style: str = "") -> None:
    indent = len(text) - len(text.lstrip())
    line = Text(text.lstrip() if console.is_terminal else text, style=style, overflow="fold")
    wrapped = Padding(line, (0, 0, 0, indent), expand=False) if console.is_terminal and indent else line
    console.print(wrapped, soft_wrap=not console.is_terminal, highlight=False)
