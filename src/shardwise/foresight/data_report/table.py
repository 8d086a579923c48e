"""The data report in the terminal: a table of the sources that fits any width, then the notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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
    """One column of the table; on a narrow terminal, columns of higher rank go to later tables."""

    title: str
    rank: int
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(cell_len, [self.title, *self.cells])) + _GAP


@dataclass(frozen=True)
class _ColumnRule:
    """How a column is filled: the cell of a source, the cell of the last row, and whether it is shown at all."""

    title: str
    rank: int
    cell: Callable[[SourceStatistics], str]
    total: Callable[[Sequence[SourceStatistics]], str] | None = None
    shown: Callable[[Sequence[SourceStatistics], bool], bool] = lambda sources, mixture: True


def _counted(title: str, rank: int, field: str) -> _ColumnRule:
    """A column of counts, with their sum in the last row."""

    def cell(source: SourceStatistics) -> str:
        return f"{getattr(source, field):,}"

    def total(sources: Sequence[SourceStatistics]) -> str:
        return f"{sum(getattr(source, field) for source in sources):,}"

    return _ColumnRule(title, rank, cell, total)


def _any_held_out(sources: Sequence[SourceStatistics], mixture: bool) -> bool:
    return any(source.held_out for source in sources)


def _several_mixed(sources: Sequence[SourceStatistics], mixture: bool) -> bool:
    return mixture and len(sources) > 1


def _learned_total(sources: Sequence[SourceStatistics]) -> str:
    return _share(SourceTotals(sources).learned_share)


_COLUMNS = (
    _counted("rows", 3, "rows"),
    _counted("documents", 6, "documents"),
    replace(_counted("held out", 11, "held_out"), shown=_any_held_out),
    _counted("tokens", 1, "tokens"),
    _ColumnRule("learned", 2, lambda source: _share(source.learned_share), _learned_total),
    _ColumnRule("mixture", 4, lambda source: _share(source.share), shown=_several_mixed),
    _counted("left out", 5, "left_out"),
    _ColumnRule("median", 8, lambda source: f"{source.percentile(0.5):,}"),
    _ColumnRule("99%", 7, lambda source: f"{source.percentile(0.99):,}"),
    _ColumnRule("longest", 9, lambda source: f"{source.longest or source.percentile(1.0):,}"),
    _ColumnRule("tokens/s", 10, lambda source: "cached" if source.cached else _rate(source.tokens_per_second)),
)


def print_bill(statistics: DataStatistics, console: Console) -> None:
    """Prints the table, each source, the packing, and the rows that were dropped or changed."""
    template = f", template {one_line(statistics.template)}" if statistics.template else ""
    _print(console, f"tokenizer {one_line(statistics.tokenizer)}{template}", "dim")
    for title, sources in (("training data", statistics.train), ("evaluation data", statistics.eval)):
        if sources:
            console.print()
            for table in _tables(title, sources, console.width, mixture=sources is statistics.train):
                console.print(table)
    console.print()
    for source in statistics.sources:
        _print_source(source, console)
    _print(console, _packing_line(statistics))
    if statistics.steps is not None:
        _print(console, f"{counted(statistics.steps.steps, 'step', 'steps')}: {statistics.steps.words}")
    for source in statistics.sources:
        _print_fates(source, console)


def print_notices(notices: Sequence[Notice], console: Console) -> None:
    """Prints the warnings, one paragraph each."""
    for notice in notices:
        line = Text("warning: ", style="bold yellow")
        line.append(f"{one_line(notice.source)}: " if notice.source else "", style="not bold default")
        line.append(several_lines(notice.text), style="not bold default")
        console.print(line, soft_wrap=not console.is_terminal, highlight=False)


def print_problems(errors: Sequence[UserError], console: Console) -> None:
    """Prints the errors that would fail the run."""
    for error in errors:
        line = Text("error: ", style="bold red")
        line.append(several_lines(error), style="not bold default")
        console.print(line, soft_wrap=True, highlight=False)


def _tables(title: str, sources: list[SourceStatistics], width: int, mixture: bool) -> Iterator[Table]:
    """Yields tables with all columns: those that one has no room for go to another below it."""
    several = len(sources) > 1
    names = [one_line(s.name) for s in sources] + (["all"] if several else [])
    columns = [_column(rule, sources) for rule in _COLUMNS if rule.shown(sources, mixture)]
    first_columns = sum(entry.width for entry in columns if entry.rank <= _FIRST)
    name_width = min(max(map(cell_len, names)), _MOST_NAME, width - first_columns - _GAP)
    room = width - max(_LEAST_NAME, name_width) - _GAP
    while columns:
        shown_ranks = set[int]()
        remaining = room
        for entry in sorted(columns, key=lambda c: c.rank):
            if entry.width > remaining and shown_ranks:
                break
            remaining -= entry.width
            shown_ranks.add(entry.rank)
        shown = [entry for entry in columns if entry.rank in shown_ranks]
        yield _table(title, names, shown, len(sources))
        columns = [entry for entry in columns if entry.rank not in shown_ranks]
        title = ""


def _table(title: str, names: list[str], columns: list[_TableColumn], sources: int) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column("source", overflow="fold", min_width=_LEAST_NAME)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for row, name in enumerate(names):
        cells = [Text(column.cells[row] if row < len(column.cells) else "") for column in columns]
        table.add_row(Text(name), *cells, style="bold" if row == sources else "")
    return table


def _column(rule: _ColumnRule, sources: Sequence[SourceStatistics]) -> _TableColumn:
    cells = [rule.cell(source) for source in sources]
    if rule.total is not None and len(sources) > 1:
        cells.append(rule.total(sources))
    return _TableColumn(rule.title, rule.rank, cells)


class SourceTotals:
    """Sums over sources."""

    def __init__(self, sources: Sequence[SourceStatistics]) -> None:
        self.rows = sum(s.rows for s in sources)
        self.documents = sum(s.documents for s in sources)
        self.tokens = sum(s.tokens for s in sources)
        self.supervised = sum(s.supervised for s in sources)
        self.learned_share = self.supervised / self.tokens if self.tokens else 0.0


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
    """Returns a histogram in one line over a logarithmic axis; bars that are not empty are always visible."""
    bars = coarse(lengths, width)
    largest = max((count for _, _, count in bars), default=0)
    signs = _ASCII_BARS if ascii_only else _BARS
    return "".join(signs[-(-count * len(signs) // largest) - 1] if count else " " for _, _, count in bars)


def _packing_line(statistics: DataStatistics) -> str:
    packing = statistics.packing
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
    """Prints the rows that were dropped or changed, by place."""
    if not any(source.fates.values()):
        return
    console.print()
    counts = ", ".join(f"{count:,} {one_line(fate)}" for fate, count in source.fates.items() if count)
    _print(console, f"{one_line(source.name)}: {counts}", "bold")
    if source.fates_file is None:
        return
    rows = read_fates(source.fates_file, LISTED, source.fates)
    remaining = LISTED
    listed = 0
    for index, (fate, places) in enumerate(rows.items()):
        # Every fate gets its part of the room, so that one that is frequent does not hide the others.
        for where, reason in places[: max(1, remaining // (len(rows) - index))]:
            explanation = f" ({clipped(one_line(reason))})" if reason else ""
            _print(console, f"  {one_line(fate)}: {one_line(where)}{explanation}")
            remaining = remaining - 1
            listed = listed + 1
    unlisted = sum(source.fates.values()) - listed
    prefix = f"and {unlisted:,} more; all of them" if unlisted > 0 else "also"
    _print(console, f"  {prefix} in {one_line(source.fates_file)}", "dim")


def clipped(text: str, limit: int = _MOST_REASON) -> str:
    """Shortens a reason, which may quote a whole row."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _print(console: Console, text: str, style: str = "") -> None:
    indent = len(text) - len(text.lstrip())
    line = Text(text.lstrip() if console.is_terminal else text, style=style, overflow="fold")
    wrapped = Padding(line, (0, 0, 0, indent), expand=False) if console.is_terminal and indent else line
    console.print(wrapped, soft_wrap=not console.is_terminal, highlight=False)
