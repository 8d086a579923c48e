"""Filtering of training rows (`data.refine`).

In the order of evaluation: the filter and decontamination, row by row in the workers (`RowRules`); duplicates, in a
pass over the remaining rows (`row_keys` in the workers, `DuplicateFinder` in the parent, see duplicates.py); the length
in tokens, once a row is rendered (`length_fate`). A row dropped for one reason does not count as a first occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.config.schema import Refine
from shardwise.data.decontaminate import EvalNgrams
from shardwise.data.duplicates import DuplicateFinder, Removal, Removals, RowKeys, row_keys
from shardwise.data.examples import BadRow, Document, Example, Raw
from shardwise.data.expression import Expression

__all__ = ["DuplicateFinder", "EvalNgrams", "Removal", "Removals", "RowKeys", "RowRules", "length_fate", "row_keys"]


class RowRules:
    """Rules that judge each row by itself; evaluated in the workers."""

    def __init__(self, refine: Refine, passages: EvalNgrams | None = None) -> None:
        self.filter = None if refine.filter is None else Expression(refine.filter)
        self.passages = passages

    def judge(self, rows: Sequence[tuple[Raw, Example]]) -> list[Removal | BadRow | None]:
        """For each row: None to keep it, a Removal to drop it, or a BadRow if the rules cannot be evaluated."""
        fates: list[Removal | BadRow | None] = [self._filtered(raw, example) for raw, example in rows]
        if self.passages is not None:
            for index, reason in enumerate(self.passages.hits([example for _, example in rows])):
                if reason is not None and fates[index] is None:
                    fates[index] = Removal("contaminated", reason)
        return fates

    def _filtered(self, raw: Raw, example: Example) -> Removal | BadRow | None:
        if self.filter is None:
            return None
        try:
            return None if self.filter.matches(raw.value, example) else Removal("filtered", self.filter.text)
        except BadRow as bad:
            return bad


def length_fate(document: Document, refine: Refine) -> Removal | None:
    """Removal for a rendered row that is too short or too long; None otherwise."""
    length = len(document.tokens)
    if length < refine.min_tokens:
        return Removal("too short", f"{length} tokens, data.refine.min_tokens is {refine.min_tokens}")
    if refine.max_tokens is not None and length > refine.max_tokens:
        return Removal("too long", f"{length} tokens, data.refine.max_tokens is {refine.max_tokens}")
    return None
