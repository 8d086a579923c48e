"""Follows files that another process appends to, reading each byte once: 100,000 steps must not be reread every time.

A file that was replaced or truncated (a resumed run drops the steps after its checkpoint) is read from the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]
LARGEST_JSON = 16 << 20  # bytes
LONGEST_LINE = 1 << 20  # bytes; a record has some hundreds
AT_ONCE = 1 << 17  # bytes read at a time: no other thread runs while they are parsed, some milliseconds


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file of a run: a symbolic link could expose other files, a pipe would never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no file")
    return os.fdopen(handle, "rb")


class Tail:
    """Yields the records of a JSON-lines file as it grows; an incomplete last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._inode = 0, -1
        self._rest = b""
        self.behind = 0  # bytes that were left when it was last read

    def unread(self) -> int:
        """Number of bytes not read yet."""
        try:
            status = self.path.stat()
        except OSError:
            return 0
        known = status.st_ino == self._inode and status.st_size >= self._offset
        return status.st_size - (self._offset if known else 0)

    def read(self) -> tuple[list[Record], bool]:
        """New records, and whether the file was replaced, so that earlier ones are invalid.

        A large amount is read in several calls: `behind` is the number of bytes left.
        """
        try:
            with open_file(self.path) as file:
                status = os.fstat(file.fileno())
                replaced = self._inode not in (-1, status.st_ino) or status.st_size < self._offset
                if replaced:
                    self._offset, self._rest = 0, b""
                self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read(min(AT_ONCE, max(0, status.st_size - self._offset)))
        except OSError:
            removed = self._inode != -1
            self._inode = -1
            self._offset = 0
            self._rest = b""
            self.behind = 0
            return [], removed
        self._offset += len(data)
        self.behind = max(0, status.st_size - self._offset)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""  # no record of ours
        return _records(lines), replaced


def _records(lines: list[bytes]) -> list[Record]:
    """Parses lines leniently: a dashboard shows what it can, errors are reported by the training side."""
    with contextlib.suppress(ValueError, RecursionError):  # all at once is faster, and mostly all are whole
        together = json.loads(b"[" + b",".join(line for line in lines if line.strip()) + b"]")
        return [record for record in together if isinstance(record, dict)]
    records = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def sampled(path: Path, count: int) -> list[Record]:
    """Records from evenly spaced positions of a long file, in order: a preview while the full file is read."""
    lines: list[bytes] = []
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            for place in range(count):
                file.seek(place * size // count)
                if place:
                    file.readline(LONGEST_LINE)  # the rest of a line
                line = file.readline(LONGEST_LINE)
                if line.endswith(b"\n") and (not lines or line != lines[-1]):
                    lines.append(line)
    except OSError:
        return []
    return _records(lines)


def last_bytes(path: Path, size: int) -> bytes:
    """The end of a file, from the beginning of a line on; empty if the file is missing."""
    try:
        with open_file(path) as file:
            length = os.fstat(file.fileno()).st_size
            file.seek(max(0, length - size))
            data = file.read(size)
    except OSError:
        return b""
    return data if length <= size else data.partition(b"\n")[2]


def last_lines(path: Path, lines: int, size: int = 1 << 16) -> list[str]:
    """The last lines of a log as text; invalid bytes are marked, control characters removed."""
    text = last_bytes(path, size).decode("utf-8", "replace")
    return [_visible(line) for line in text.splitlines()[-lines:]]


def last_records(path: Path, size: int = 1 << 13) -> list[Record]:
    """The last records of a JSON-lines file."""
    return _records(last_bytes(path, size).split(b"\n"))


def first_record(path: Path) -> Record:
    """The first record of a JSON-lines file; empty if there is none."""
    try:
        with open_file(path) as file:
            line = file.readline(LONGEST_LINE)
    except OSError:
        return {}
    return next(iter(_records([line])), {})


def read_json(path: Path) -> Record:
    """A JSON object from a file; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with open_file(path) as file:
            value = json.loads(file.read(LARGEST_JSON))
        if isinstance(value, dict):
            return value
    return {}


def _visible(line: str) -> str:
    """Removes escape sequences and control characters, which would control a terminal."""
    return "".join(c for c in line if c == "\t" or c.isprintable())[:2000]
