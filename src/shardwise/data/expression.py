"""Row filters (`data.refine.filter`) on examples; the language is config/row_filter.py's."""

from __future__ import annotations

from typing import Any

from shardwise.config.row_filter import RowFilter
from shardwise.config.row_filter_operations import Undecided
from shardwise.data.examples import BadRow, Example
from shardwise.data.word_hashes import text_of


class Expression(RowFilter):
    """A row filter evaluated on examples."""

    def matches(self, row: Any, example: Example) -> bool:
        """Whether the filter keeps the row; raises BadRow if it cannot be evaluated on it."""
        try:
            return self.keeps(row, lambda: text_of(example), lambda: _turns(example))
        except Undecided as error:
            raise BadRow(example.where, example.number, error.problem, error.remedy) from None


def _turns(example: Example) -> int:
    """Number of messages without the system prompt; 1 for a text."""
    if not example.messages and example.kind not in ("preference", "kto"):
        return 2 if example.kind == "pair" else 1
    return sum(1 for m in example.messages if m.get("role") != "system") + len(example.chosen)
