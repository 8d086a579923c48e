"""Splits line-based, CSV and text files into chunks of rows that a worker can parse.

[Note: cutting] The parent process only locates row boundaries; workers decode and parse. Chunk boundaries depend on the
bytes alone, so the same file gives the same chunks everywhere. A row that cannot be parsed is passed on as a BadRow;
only damage that hides where the next row begins (an unbalanced JSON list, a truncated archive) ends the reading.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow, Raw
from shardwise.data.streams import BROKEN, Input, broken, is_compressed, open_bytes

CHUNK_ROWS = 2048
CHUNK_BYTES = 8 << 20
MAX_ROW = 64 << 20  # of one line, JSON value or text file; nobody trains on a row of more
READ = 4 << 20
BOM = b"\xef\xbb\xbf"
BLANK = " \t\r\n\x0b\x0c"

Rows = Iterator[Raw | BadRow]


class ChunkPart(Protocol):
    """What a worker needs to read a chunk; `rows` is the number of rows in it, including bad ones."""

    @property
    def rows(self) -> int: ...

    def read(self, first: int) -> Rows:
        """Yields the rows, numbered from `first`."""


# Lines


@dataclass(frozen=True)
class Lines:
    """JSON lines: a byte range of an uncompressed file, or the bytes themselves."""

    path: str
    line: int
    rows: int
    offset: int
    size: int
    data: bytes | None

    def read(self, first: int) -> Rows:
        data = self.data
        if data is None:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        try:
            text = data.decode()
            damaged = False
        except UnicodeDecodeError:  # somewhere; each line is looked at alone
            text = data.decode(errors="surrogateescape")
            damaged = True
        number = first
        for line, row in enumerate(text.split("\n"), self.line):
            if not row.strip(BLANK):
                continue
            content = row.encode(errors="surrogateescape") if damaged else row
            yield json_row(content, f"{self.path}:{line}", number, "line")
            number += 1


@dataclass(frozen=True)
class BadLine:
    """A row rejected before parsing."""

    where: str
    problem: str
    remedy: str
    rows: int = 1

    def read(self, first: int) -> Rows:
        yield BadRow(self.where, first, self.problem, self.remedy)


def too_long(where: str, unit: str) -> BadLine:
    """Returns the BadLine for a row that exceeds MAX_ROW and is not parsed."""
    problem = f"this {unit} is longer than {MAX_ROW >> 20} MB, more than a row may have"
    return BadLine(where, problem, "divide it into several rows, or delete it")


def cut_lines(stream: Input) -> Iterator[Lines | BadLine]:
    """Yields the chunks of a JSON-lines file."""
    path = str(stream.path)
    keep = is_compressed(stream.path)
    carry = b""
    offset = 0
    block = stream.read(READ)
    if block.startswith(BOM):
        block = block[len(BOM) :]
        offset = len(BOM)
    while block or carry:
        if len(carry) > MAX_ROW and b"\n" not in block and block:
            offset += len(block)  # the rest of a line that will be refused is not kept
            block = stream.read(READ)
            continue
        data = carry + block
        if not block and not data.endswith(b"\n"):
            data += b"\n"
        codes = np.frombuffer(data, dtype=np.uint8)
        ends = np.flatnonzero(codes == 10) + 1
        start = done = 0
        while done < len(ends):
            upto = min(done + CHUNK_ROWS, int(np.searchsorted(ends, start + CHUNK_BYTES, "right")))
            upto = max(upto, done + 1)
            full = upto == done + CHUNK_ROWS or upto < len(ends) or len(data) - start > CHUNK_BYTES
            if block and not full:
                break
            end = int(ends[upto - 1])
            if end - start > MAX_ROW:
                yield too_long(f"{path}:{stream.line}", "line")
            else:
                lines = upto - done
                heads = codes[np.concatenate([[start], ends[done : upto - 1]])]
                blank = 0
                if (heads <= 32).any():
                    blank = sum(not line.strip() for line in data[start : end - 1].split(b"\n"))
                if lines > blank:
                    piece = data[start:end] if keep else None
                    yield Lines(path, stream.line, lines - blank, offset + start, end - start, piece)
            stream.line += upto - done
            start, done = end, upto
        carry = data[start:]
        offset = offset + start
        block = stream.read(READ) if block else b""


def json_row(text: str | bytes, where: str, number: int, unit: str) -> Raw | BadRow:
    """Parses one JSON object; returns a BadRow with the reason if it is not one."""
    try:
        value = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        return BadRow(where, number, f"is not UTF-8 text ({error.reason})", "convert the file to UTF-8")
    except _DuplicateKey as error:
        return BadRow(where, number, f'has the key "{error}" twice', "keep one of them")
    except json.JSONDecodeError as error:
        problem = f"this {unit} is not JSON ({error.msg.removesuffix(' at')} at character {error.pos + 1})"
        if (b"\0" if isinstance(text, bytes) else "\0") in text:  # type: ignore[operator]
            problem = f"this {unit} is not JSON: it holds NUL bytes (was the file written to its end?)"
        return BadRow(where, number, problem, f"mend or delete the {unit}; each {unit} is one JSON object")
    except RecursionError:
        return BadRow(where, number, f"this {unit} is nested too deeply", "flatten or delete it")
    except ValueError as error:  # an integer of more than 4300 digits
        return BadRow(where, number, f"this {unit} cannot be read ({error})", "write such numbers as strings")
    if type(value) is not dict:
        return not_a_row(value, where, number)
    return Raw(where, number, value)


_CALLED = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def type_name(value: Any) -> str:
    """Name of a JSON value's type, for messages."""
    return "null" if value is None else _CALLED.get(type(value), type(value).__name__)


def not_a_row(value: Any, where: str, number: int) -> BadRow:
    """Returns the BadRow for a JSON value that has no columns."""
    problem = f"a row must be a JSON object, this is {type_name(value)}"
    return BadRow(where, number, problem, 'write {"messages": […]} or {"text": "…"} for each row')


class _DuplicateKey(Exception):
    """An object has the same key twice, so its value is ambiguous."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for key in keys if keys.count(key) > 1))
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


# CSV


@dataclass(frozen=True)
class Records:
    """CSV records with the lines at which they begin."""

    path: str
    header: tuple[str, ...]
    records: tuple[tuple[int, list[str] | str], ...]  # fields, or what is wrong with the record

    @property
    def rows(self) -> int:
        return len(self.records)

    def read(self, first: int) -> Rows:
        for number, (line, fields) in enumerate(self.records, first):
            where = f"{self.path}:{line}"
            if isinstance(fields, str):
                yield BadRow(where, number, f"is not CSV ({fields})", 'quote fields with "…", and write " within as ""')
            elif len(fields) != len(self.header):
                problem = f"has {len(fields)} fields, the header names {len(self.header)}"
                yield BadRow(where, number, problem, "quote fields that hold the delimiter or a newline")
            elif any(not f.isascii() and _ESCAPED.search(f) for f in fields):
                yield BadRow(where, number, "is not UTF-8 text (invalid byte)", "convert the file to UTF-8")
            else:
                yield Raw(where, number, dict(zip(self.header, fields, strict=True)))


_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as the error handler writes them


def cut_records(stream: Input, delimiters: str) -> Iterator[Records]:
    """Yields the chunks of a CSV file, whose first record names the columns."""
    csv.field_size_limit(MAX_ROW)  # the csv module has this one for all readers; its own default is 128 KB
    path = str(stream.path)
    lines = _text_lines(stream)
    head = next(lines, "")
    delimiter = max(delimiters, key=lambda d: (_columns(head, d), d == delimiters[0]))
    reader = csv.reader(_chained(head, lines), delimiter=delimiter, strict=True)
    header: tuple[str, ...] | None = None
    chunk: list[tuple[int, list[str] | str]] = []
    size = 0
    while True:
        line = reader.line_num + 1
        fields: list[str] | str
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if "field larger" in str(error):
                problem = f"a field is longer than {MAX_ROW >> 20} MB; is a quote not closed?"
                raise UserError(stream.field, f"{path}:{line}", problem, "mend the record") from None
            fields = "a quote is not closed" if "end of data" in str(error) else str(error)
        if header is None:
            if fields:
                header = _header(fields, f"{path}:{line}", stream.field)
            continue
        if not any(fields):
            continue
        length = sum(map(len, fields))
        if len(chunk) == CHUNK_ROWS or (chunk and size + length > CHUNK_BYTES):
            yield Records(path, header, tuple(chunk))
            chunk, size = [], 0
        chunk.append((line, fields))
        size += length
    if chunk and header:
        yield Records(path, header, tuple(chunk))


def _text_lines(stream: Input) -> Iterator[str]:
    while line := stream.readline(MAX_ROW + 1):
        if len(line) > MAX_ROW:
            refused = too_long(f"{stream.path}:{stream.line}", "line")
            raise UserError(stream.field, refused.where, refused.problem, refused.remedy)
        if stream.line == 1 and line.startswith(BOM):
            line = line[len(BOM) :]
        stream.line += 1
        yield line.decode(errors="surrogateescape")


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _columns(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error:
        return 0


def _header(fields: list[str] | str, where: str, field: str) -> tuple[str, ...]:
    names = [] if isinstance(fields, str) else [name.strip() for name in fields]
    if not names or len(set(names)) < len(names) or any(len(n) > 128 or "\n" in n or _ESCAPED.search(n) for n in names):
        problem = "the first line must name the columns, each name once"
        raise UserError(field, where, problem, "add a header such as prompt,completion")
    return tuple(names)


# Text


@dataclass(frozen=True)
class Texts:
    """Text and code files; each file is one row."""

    paths: tuple[str, ...]

    @property
    def rows(self) -> int:
        return len(self.paths)

    def read(self, first: int) -> Rows:
        for number, path in enumerate(self.paths, first):
            row = _text_row(path, number)
            if isinstance(row, BadRow) or row.value:
                yield row


def _text_row(path: str, number: int) -> Raw | BadRow:
    try:
        with open_bytes(Path(path)) as file:
            data = file.read(MAX_ROW + 1)
    except BROKEN as error:
        return BadRow(path, number, *broken(error))
    if len(data) > MAX_ROW:
        problem = f"has more than {MAX_ROW >> 20} MB; a text file is one row"
        return BadRow(path, number, problem, "divide it, or write .jsonl with a row per text")
    if b"\0" in data and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return BadRow(path, number, "holds NUL bytes: it is no text", "leave the file out")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return BadRow(f"{path}:{line}", number, f"is not UTF-8 text ({error.reason})", "convert the file to UTF-8")
    return Raw(path, number, text.replace("\r\n", "\n").replace("\r", "\n"))


def cut_texts(paths: Iterable[Path]) -> Iterator[Texts]:
    """Yields chunks of text files, skipping empty ones."""
    chunk: list[str] = []
    size = 0
    for path in paths:
        length = path.stat().st_size
        if not length:
            continue
        if len(chunk) == CHUNK_ROWS or (chunk and size + length > CHUNK_BYTES):
            yield Texts(tuple(chunk))
            chunk, size = [], 0
        chunk.append(str(path))
        size += length
    if chunk:
        yield Texts(tuple(chunk))
