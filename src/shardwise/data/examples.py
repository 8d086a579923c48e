"""The row types of the data pipeline: raw rows, examples and documents, one shape for every input format.

files → rows (files.py) → examples (formats.py) → documents (render.py) → chunks of tokens (store.py) → sequences
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Kind = Literal["chat", "text", "segments", "tokens", "preference", "kto", "pair", "label"]
Message = dict[str, Any]  # role and content, as chat templates take them; tool_calls, name, tool_call_id if any


@dataclass(frozen=True)
class Raw:
    """A row as read from its file: a mapping, or the text of a full file. `number` counts the source's rows from 0."""

    where: str
    number: int
    value: Any


@dataclass(frozen=True)
class Example:
    """A parsed row. Which fields are set depends on its kind:

    chat        messages (tools; weights: per message 0, 1 or None = as data.loss_on says)
    text        text
    segments    segments: (text, learned) pairs that are joined as they stand
    tokens      tokens and learned (None = all)
    preference  messages (the prompt), chosen, rejected: messages that answer it
    kto         messages (the prompt), chosen: the answer, label: whether it is wanted
    pair        prompt and text (the target); for seq2seq, and prompt and completion for a causal model
    label       text (and a second one) and its category, as the row calls it
    """

    where: str
    number: int
    kind: Kind
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    weights: tuple[int | None, ...] = ()
    text: str = ""
    prompt: str = ""
    segments: tuple[tuple[str, bool], ...] = ()
    tokens: tuple[int, ...] = ()
    learned: tuple[bool, ...] | None = None
    chosen: tuple[Message, ...] = ()
    rejected: tuple[Message, ...] = ()
    label: bool | None = None
    second: str = ""
    category: str = ""


@dataclass(frozen=True)
class Document:
    """Token ids and a loss mask (`learned`; always False for the first token, which nothing predicts).

    `head` is a number stored before the tokens, for purposes that need one (layout.py); `remarks` are warnings about
    the row (row_warnings.py).
    """

    where: str
    number: int
    tokens: np.ndarray
    learned: np.ndarray
    head: int | None = None
    remarks: tuple[str, ...] = ()


class BadRow(Exception):
    """A row that cannot be used, and why; `data.on_bad_row` decides whether it ends the run."""

    def __init__(self, where: str, number: int, problem: str, remedy: str) -> None:
        super().__init__(where, number, problem, remedy)  # all of them: it must survive a trip between processes
        self.where = where
        self.number = number
        self.problem = problem
        self.remedy = remedy


@dataclass
class RowOutcomes:
    """Rows that were skipped, dropped, truncated or split: for each fate, the rows by location (file and line)."""

    rows: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # fate → (where, reason)

    def add(self, fate: str, where: str, reason: str = "") -> None:
        """Records the fate of one row."""
        self.rows.setdefault(fate, []).append((where, reason))
