"""Rows of a user's file for evaluation: any file that training reads, with columns found by their usual names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.config.schema import Source
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow
from shardwise.data.files import chunk_tasks, read_chunk
from shardwise.data.row_parsers import look_up


@dataclass(frozen=True)
class EvalRow:
    """A row with its place in the file."""

    where: str
    value: dict[str, Any]
    field: str  # the setting that named the file

    def get(self, fields: dict[str, str], name: str, usual: Sequence[str] = ()) -> Any:
        """Returns a value by our name: from the column that `fields` names, or the first usual one it has."""
        columns = [fields[name]] if name in fields else [name, *usual]
        values = (look_up(self.value, column) for column in columns)
        return next((value for value in values if value is not None and value != ""), None)

    def need(self, fields: dict[str, str], name: str, usual: Sequence[str] = ()) -> Any:
        """Like `get`, but raises UserError if it is missing."""
        value = self.get(fields, name, usual)
        if value is None:
            keys = ", ".join(map(str, list(self.value)[:8]))
            remedy = f"say which column it is, e.g. fields: {{{name}: COLUMN}}, or mend the row"
            raise self.wrong(f"the row has no {name} (its columns: {keys})", remedy)
        return value

    def wrong(self, problem: str, remedy: str) -> UserError:
        """Returns an error about this row."""
        return UserError(self.field, self.where, problem, remedy)


def read_rows(path: str, field: str, limit: int | None = None) -> list[EvalRow]:
    """Returns the rows of a file or folder, at most `limit`; an unreadable row is an error that names its line."""
    rows: list[EvalRow] = []
    for task in chunk_tasks(Source(path=path), field):
        for raw in read_chunk(task):
            if isinstance(raw, BadRow):
                raise UserError(field, raw.where, raw.problem, raw.remedy)
            if not isinstance(raw.value, dict):
                raise UserError(field, raw.where, "is text without columns", "give JSON lines, CSV or Parquet")
            rows.append(EvalRow(raw.where, raw.value, field))
            if limit is not None and len(rows) >= limit:
                return rows
    if not rows:
        raise UserError(field, path, "holds no rows", "check the file")
    return rows
