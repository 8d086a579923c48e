"""Answers of two models to the same question: side by side on a wide terminal, else one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwise.nn.generate import Reply

WIDE = 100  # columns from which two answers fit beside each other

Asking = Callable[[Callable[[str], None]], Reply]


def show_answers(
    console: Console, asks: Mapping[str, Asking], summary: Callable[[Reply], str], note: Callable[[str], None]
) -> list[Reply]:
    """Asks each model in turn and shows its answer under its title; an interrupted answer is the last."""
    if console.is_terminal and console.width >= WIDE:
        return _side_by_side(console, asks, summary)
    answers: list[Reply] = []
    for title, ask in asks.items():
        console.print(title, style="bold", markup=False, highlight=False)
        answers.append(ask(lambda text: console.out(harmless(text), end="", highlight=False)))
        if not answers[-1].text.endswith("\n"):
            console.print()
        note(summary(answers[-1]))
        if answers[-1].ended == "interrupted":
            break
    return answers


def _side_by_side(console: Console, asks: Mapping[str, Asking], summary: Callable[[Reply], str]) -> list[Reply]:
    texts = {title: "" for title in asks}
    notes = {title: "" for title in asks}
    answers: list[Reply] = []
    # While it grows, what does not fit on the screen is cut; the whole is printed once it is there.
    with Live(console=console, transient=True, refresh_per_second=8) as live:
        for title, ask in asks.items():

            def show(text: str, title: str = title) -> None:
                texts[title] += harmless(text)
                live.update(_table(texts, notes))

            answers.append(ask(show))
            notes[title] = summary(answers[-1])
            if answers[-1].ended == "interrupted":
                break
    console.print(_table(texts, notes))
    return answers


def _table(texts: Mapping[str, str], notes: Mapping[str, str]) -> Table:
    table = Table(expand=True, show_edge=False, pad_edge=False)
    for title in texts:
        table.add_column(Text(title), ratio=1, overflow="fold")
    table.add_row(*(Text(text) for text in texts.values()))
    table.add_row(*(Text(line, style="dim") for line in notes.values()))
    return table


def other_title(name: str, first: str) -> str:
    """Returns the title of the second model, distinct from the first."""
    return name if name != first else f"{name} (2)"


def harmless(text: str) -> str:
    """Replaces escape characters in a model's output, which could repaint the terminal."""
    return text.replace("\x1b", "␛")
