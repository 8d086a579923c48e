"""Reads JSON files: a list of rows, an object that contains one, columns, a single row, or JSON lines.

Rows are located by brackets and quotes alone and parsed by the worker, so a file of any size is read in one pass with
bounded memory. Only an object of columns is loaded in full.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shardwise.config.schema import Source
from shardwise.core.errors import UserError
from shardwise.data.line_files import (
    BOM,
    CHUNK_BYTES,
    CHUNK_ROWS,
    MAX_ROW,
    READ,
    ChunkPart,
    Rows,
    cut_lines,
    json_row,
    too_long,
)
from shardwise.data.streams import Input
from shardwise.data.tables import Plain

if sys.version_info < (3, 11, 5):  # whose own patterns lose their way where they must not go back (`*+`)
    import regex as patterns
else:
    import re as patterns

MAX_COLUMNS = 256 << 20  # of a JSON file that has to be held whole
ROW_LISTS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns")  # a row may have these itself


@dataclass(frozen=True)
class Values:
    """JSON values with their locations: the line, or the row number for values that share a line."""

    path: str
    values: tuple[tuple[str, bytes], ...]

    @property
    def rows(self) -> int:
        return len(self.values)

    def read(self, first: int) -> Rows:
        for number, (place, text) in enumerate(self.values, first):
            if len(text) > MAX_ROW:
                yield next(too_long(f"{self.path}{place}", "value").read(number))
            else:
                yield json_row(text, f"{self.path}{place}", number, "value")


def _places(values: Iterable[tuple[int, bytes]]) -> Iterator[tuple[str, bytes]]:
    """Yields values with their location: `:LINE` if a value has its own line, else ` row NUMBER`."""
    before, pending = 0, None
    for number, value in enumerate(values):
        if pending is not None:
            shared = pending[0] in (before, value[0])
            yield f" row {number}" if shared else f":{pending[0]}", pending[1]
            before = pending[0]
        pending, last = value, number
    if pending is not None:
        yield f" row {last + 1}" if pending[0] == before else f":{pending[0]}", pending[1]


def cut_values(path: str, values: Iterable[tuple[int, bytes]]) -> Iterator[Values]:
    """Yields chunks of JSON values."""
    chunk: list[tuple[str, bytes]] = []
    size = 0
    for place, text in _places(values):
        if len(chunk) == CHUNK_ROWS or (chunk and size + len(text) > CHUNK_BYTES):
            yield Values(path, tuple(chunk))
            chunk, size = [], 0
        chunk.append((place, text))
        size += len(text)
    if chunk:
        yield Values(path, tuple(chunk))


_SPACE = patterns.compile(rb"[ \t\r\n]*")
_STRING, _OTHER = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', rb'[^\[\]{}"]++'
_WITHIN = patterns.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', patterns.DOTALL)  # the rest of a string that was cut off


def _nested(levels: int) -> bytes:
    """Regular expression for the contents of brackets, with complete groups of up to `levels` levels."""
    inner = rb"(?:%s|%s%s)*+"
    return inner % (_OTHER, _STRING, rb"|[\[{]" + _nested(levels - 1) + rb"[\]}]" if levels else b"")


_SKIP = patterns.compile(_nested(3), patterns.DOTALL)
# a row in one match, as most are
_GROUP = patterns.compile(
    rb"[\[{]%s[\]}]|%s" % (_nested(3), _STRING), patterns.DOTALL
)  # a row in one match, as most are
_SCALAR = patterns.compile(rb"[^\s,\]}]+")


class JsonScanner:
    """Locates the values of a JSON file without building them."""

    def __init__(self, stream: Input) -> None:
        self.stream = stream
        self.data = b""
        self.at = 0
        self.ended = False
        self._fill()
        self.at = len(BOM) if self.data.startswith(BOM) else 0

    def peek(self) -> bytes:
        """Returns the next non-space character without consuming it; empty at the end."""
        while True:
            end = _SPACE.match(self.data, self.at).end()  # type: ignore[union-attr]
            self._take(end)
            if end < len(self.data):
                return self.data[end : end + 1]
            if not self._fill():
                return b""

    def expect(self, choice: bytes) -> bytes:
        """Consumes and returns the next character, which must be one of `choice`."""
        if (character := self.peek()) not in [choice[i : i + 1] for i in range(len(choice))]:
            self.fail(f"expected {' or '.join(choice.decode())}, found {character.decode('latin-1') or 'the end'!r}")
        self._take(self.at + 1)
        return character

    def value(self) -> tuple[int, bytes]:
        """Consumes the next value; returns its line and bytes. One that is too long is cut just above MAX_ROW."""
        opening = self.peek()
        line = self.stream.line
        if opening in (b"", b",", b":", b"]", b"}"):
            self.fail(f"expected a value, found {opening.decode() or 'the end'!r}")
        if opening not in b'{["':
            while (scalar := _SCALAR.match(self.data, self.at)) and scalar.end() == len(self.data) and self._fill():
                pass
            assert scalar is not None
            return line, self._take(scalar.end())
        if group := _GROUP.match(self.data, self.at):
            return line, self._take(group.end())
        return line, self._long_value(line)

    def _long_value(self, line: int) -> bytes:
        """A value that is deeply nested or extends beyond the buffer; one that is too long is truncated."""
        depth = 0
        quoted = False
        size = 0
        pieces: list[bytes] = []
        at = self.at
        while True:
            at = (_WITHIN if quoted else _SKIP).match(self.data, at).end()  # type: ignore[union-attr]
            mark = self.data[at : at + 1]
            if not mark or mark == b"\\":
                piece = self._take(at)
                size += len(piece)
                if size <= MAX_ROW + READ:  # beyond that it will be refused, so it is not kept
                    pieces.append(piece)
                if not self._fill():
                    self.fail("the file ends within a value that begins here", line)
                at = self.at
                continue
            at += 1
            if mark == b'"':
                quoted = not quoted
            else:
                depth += 1 if mark in b"{[" else -1
            if depth <= 0 and not quoted:
                return b"".join([*pieces, self._take(at)])

    def fail(self, problem: str, line: int | None = None) -> NoReturn:
        """Raises the UserError for malformed JSON."""
        where = f"{self.stream.path}:{line or self.stream.line}"
        raise UserError(self.stream.field, where, f"is not JSON: {problem}", "mend the file, or write it as .jsonl")

    def _take(self, end: int) -> bytes:
        text = self.data[self.at : end]
        self.stream.line += text.count(b"\n")
        self.at = end
        return text

    def _fill(self) -> bool:
        block = b"" if self.ended else self.stream.read(READ)
        self.data = self.data[self.at :] + block
        self.at = 0
        self.ended = not block
        return bool(block)


def list_values(scanner: JsonScanner) -> Iterator[tuple[int, bytes]]:
    """Yields the values of the list that begins here."""
    scanner.expect(b"[")
    if scanner.peek() == b"]":
        scanner.expect(b"]")
        return
    while True:
        yield scanner.value()
        if scanner.expect(b",]") == b"]":
            return


def cut_json(file: Path, source: Source, field: str) -> Iterator[ChunkPart]:
    layout, _ = json_layout(file, source, field)
    if layout in ("columns", "row"):
        yield from _load_full(file, layout, field)
        return
    with Input(file, field) as stream:
        if layout == "lines":
            yield from cut_lines(stream)
        else:
            yield from cut_values(str(file), _json_values(JsonScanner(stream), layout))


def _json_values(scanner: JsonScanner, layout: str) -> Iterator[tuple[int, bytes]]:
    if layout == "values":
        while scanner.peek():
            yield scanner.value()
        return
    if layout == "list":
        yield from list_values(scanner)
        if scanner.peek():
            scanner.fail("something follows the list")
        return
    key = layout.removeprefix("key:")
    for name in _members(scanner):
        if name == key:
            yield from list_values(scanner)
        else:
            scanner.value()


def _members(scanner: JsonScanner) -> Iterator[str]:
    """Yields the keys of an object; the caller must consume each value before the next key."""
    scanner.expect(b"{")
    if scanner.peek() == b"}":
        scanner.expect(b"}")
        return
    while True:
        line, text = scanner.value()
        try:
            key = json.loads(text)
        except ValueError:
            key = None
        if not isinstance(key, str):
            scanner.fail("expected a key", line)
        scanner.expect(b":")
        yield key
        if scanner.expect(b",}") == b"}":
            return


def json_layout(file: Path, source: Source, field: str) -> tuple[str, str]:
    """How rows are arranged in a JSON file, and a note about it for the user."""
    with Input(file, field) as stream:
        scanner = JsonScanner(stream)
        opening = scanner.peek()
        if opening in (b"", b"["):
            _no_split(source, field)
            return ("list" if opening else "values"), ""
        if opening != b"{":
            scanner.fail("the file is neither a list of rows nor an object")
        begin = stream.line
        kinds: dict[str, tuple[str, int, set[str]]] = {}
        for key in _members(scanner):
            kinds[key] = _member_kind(scanner)
        end = stream.line
        if scanner.peek():
            _no_split(source, field)
            return ("lines", "JSON lines") if begin == end else ("values", "JSON objects one after the other")
    return _object_layout(kinds, file, source, field)


def _member_kind(scanner: JsonScanner) -> tuple[str, int, set[str]]:
    """Kind of a member (rows, other list, object or scalar), its length, and the keys of its first row."""
    opening = scanner.peek()
    if opening != b"[":
        scanner.value()
        return ("object" if opening == b"{" else "scalar"), 0, set()
    count = 0
    keys = set()
    first = b""
    for _, text in list_values(scanner):
        first = first or text
        count += 1
    if not first.startswith(b"{"):
        return "list", count, set()
    with contextlib.suppress(ValueError, RecursionError):  # then it is a bad row, and told when it is read
        keys = set(json.loads(first))
    return "rows", count, keys


def _object_layout(
    kinds: dict[str, tuple[str, int, set[str]]], file: Path, source: Source, field: str
) -> tuple[str, str]:
    lists = [key for key, (kind, _, _) in kinds.items() if kind == "rows"]
    one_row = any(key in lists and kinds[key][2] & {"role", "from"} for key in ROW_LISTS)
    lengths = {length for _, length, _ in kinds.values()}
    if source.split is not None:
        if source.split not in lists:
            problem = f"{file} has no list of rows of this name (it has {', '.join(lists) or 'none'})"
            raise UserError(f"{field}.split", source.split, problem, "set split to one of them, or leave it out")
        return f"key:{source.split}", ""
    if one_row or not kinds:
        return "row", "the object is taken as one row"
    sorts = {kind for kind, _, _ in kinds.values()}
    if (sorts <= {"rows", "list"} and "list" in sorts and (len(lengths) == 1 or not lists)) or (
        sorts == {"object"} and len(kinds) > 1
    ):
        return "columns", f"the object is taken as columns ({', '.join(list(kinds)[:8])})"
    if len(lists) == 1 or "train" in lists:
        key = lists[0] if len(lists) == 1 else "train"
        left = [other for other in kinds if other != key]
        note = f'the rows under "{key}" are taken'
        return f"key:{key}", note + (f", not {', '.join(left[:8])}" if left else "")
    if lists:
        problem = f"holds several lists of rows: {', '.join(lists)}"
        raise UserError(field, str(file), problem, f"set split: {lists[0]}, or another of them")
    return "row", "the object is taken as one row"


def _load_full(file: Path, layout: str, field: str) -> Iterator[ChunkPart]:
    with Input(file, field) as stream:
        text = stream.read(MAX_COLUMNS + 1)
    if len(text) > MAX_COLUMNS:
        problem = f"is one JSON object of more than {MAX_COLUMNS >> 20} MB, which has to be held in memory"
        raise UserError(field, str(file), problem, "write a list of rows, or .jsonl")
    if layout == "row":
        yield from cut_values(str(file), [(1, text.removeprefix(BOM))])
        return
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(field, str(file), f"is not JSON ({error})", "mend the file, or write it as .jsonl") from None
    rows = _rows_of_columns(value)
    if rows is None:
        problem = f"its columns ({', '.join(list(value)[:8])}) are not of one length"
        raise UserError(field, str(file), problem, "write a list of rows, or .jsonl")
    for start in range(0, len(rows), CHUNK_ROWS):
        part = Plain(str(file), start + 1, tuple(rows[start : start + CHUNK_ROWS]))
        try:
            pickle.dumps(part)  # as it will be on its way to a worker
        except RecursionError:
            where = f"{file} rows {start + 1} to {start + part.rows}"
            raise UserError(field, where, "a value is nested too deeply", "flatten it, or write .jsonl") from None
        yield part


def _rows_of_columns(value: dict[str, Any]) -> list[Any] | None:
    """Rows from columns of equal length, or from objects by id (pandas writes both); None if neither."""
    objects = [column for column in value.values() if isinstance(column, dict)]
    if objects and not all(key.isdecimal() for column in objects for key in column):
        return list(value.values())
    if any(column.keys() != objects[0].keys() for column in objects):
        return None
    columns = {name: list(c.values()) if isinstance(c, dict) else c for name, c in value.items()}
    if len({len(column) for column in columns.values()}) != 1:
        return None
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _no_split(source: Source, field: str) -> None:
    if source.split is not None:
        problem = f"has no meaning here: {source.path} is a list of rows"
        raise UserError(f"{field}.split", source.split, problem, "remove split")
