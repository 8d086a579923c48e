"""Tokens of a source on disk, in chunks that can be read while later ones are still being written.

[Note: chunks] Rows are tokenised in chunks of consecutive rows. A chunk is two arrays: the concatenated tokens of its
documents, with the top bit set in loss tokens, and a table of its documents. The table is renamed into place last, so a
chunk that exists is complete. `done.json` has the number of chunks; `failed.json` means that no more will follow, and
why. Readers map the arrays: a run's memory does not grow with the source.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.core.errors import UserError
from shardwise.data.examples import Document

LEARNED = np.uint32(1 << 31)
TABLE = np.dtype([("length", np.int32), ("supervised", np.int32), ("row", np.int64)])
OPEN = 96  # chunks that are kept at hand: two shuffle windows of 65,536 documents, and some more
POLL = 0.05  # seconds


def write_chunk(folder: Path, index: int, documents: Sequence[Document]) -> None:
    """Writes a chunk atomically."""
    table = np.empty(len(documents), dtype=TABLE)
    parts = []
    for row, document in zip(table, documents, strict=True):
        tokens, learned = document.tokens.astype(np.uint32), document.learned.astype(bool)
        learned[:1] = False  # readers rely on it: nothing predicts a first token, least of all the document before it
        marked = np.where(learned, tokens | LEARNED, tokens)
        parts.append(marked if document.head is None else np.append(np.uint32(document.head), marked))
        row["length"], row["supervised"], row["row"] = len(parts[-1]), int(learned.sum()), document.number
    flat = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)
    for array, suffix in ((flat, "tokens"), (table, "table")):
        partial = folder / f".{index:07}.{suffix}.{os.getpid()}"
        with partial.open("wb") as file:
            np.save(file, array)
        partial.rename(_file(folder, index, suffix))


def has_chunk(folder: Path, index: int) -> bool:
    """Whether a chunk exists."""
    return _file(folder, index, "table").is_file()


def finish(folder: Path, chunks: int, facts: dict[str, Any]) -> None:
    """Marks the store as complete, with its number of chunks and facts."""
    write_json(folder / "done.json", {"chunks": chunks} | facts)


def fail(folder: Path, error: UserError) -> None:
    """Marks the store as failed, with the error."""
    write_json(folder / "failed.json", {"args": [error.field, error.value, error.problem, error.remedy]})


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file atomically."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, default=str))
    partial.rename(file)


def _file(folder: Path, index: int, suffix: str) -> Path:
    return folder / f"{index:07}.{suffix}.npy"


class TokenStore:
    """Documents of one source by chunk and index; waits for chunks that are still being written."""

    def __init__(self, folder: Path, alive: Callable[[], bool] = lambda: True) -> None:
        self.folder, self._alive = folder, alive
        self._facts: dict[str, Any] | None = None
        self._tables: OrderedDict[int, np.ndarray] = OrderedDict()
        self._tokens: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    @property
    def facts(self) -> dict[str, Any] | None:
        """Facts about the complete store; None while it is being written."""
        if self._facts is None and (self.folder / "done.json").is_file():
            self._facts = json.loads((self.folder / "done.json").read_text())
        return self._facts

    def ready(self, chunk: int) -> bool | None:
        """Whether a chunk exists; None if that is not known yet."""
        if chunk in self._tables or _file(self.folder, chunk, "table").is_file():
            return True
        alive = self._facts is not None or self._alive()  # asked first: its last words come before it goes
        if self.facts is not None:
            return chunk < int(self.facts["chunks"])
        if (failed := self.folder / "failed.json").is_file():
            raise UserError(*json.loads(failed.read_text())["args"])
        if not alive:
            problem = "the process that tokenises has died"
            raise UserError("data", str(self.folder), problem, "start the run again; what is done is kept")
        return None

    def has(self, chunk: int) -> bool:
        """Whether a chunk exists; waits until it does or the source has ended."""
        while (answer := self.ready(chunk)) is None:
            time.sleep(POLL)
        return answer

    def wait(self) -> dict[str, Any]:
        """Waits for the complete store and returns its facts."""
        while self.facts is None:
            self.has(1 << 60)
        return self.facts

    def table(self, chunk: int) -> np.ndarray:
        """Length, number of loss tokens and row number of each document of a chunk."""
        if chunk not in self._tables:
            self._tables[chunk] = _values(np.fromfile(self._file(chunk, "table"), np.uint8), TABLE)
            if len(self._tables) > OPEN:
                self._tables.popitem(last=False)
        self._tables.move_to_end(chunk)
        return self._tables[chunk]

    def marked(self, chunk: int, index: int) -> np.ndarray:
        """A document's tokens as stored, with the top bit set in loss tokens; read-only."""
        if chunk not in self._tokens:
            starts = np.concatenate([[0], np.cumsum(self.table(chunk)["length"], dtype=np.int64)])
            self._tokens[chunk] = mapped(self._file(chunk, "tokens")), starts
            if len(self._tokens) > OPEN:
                self._tokens.popitem(last=False)
        self._tokens.move_to_end(chunk)
        flat, starts = self._tokens[chunk]
        return flat[starts[index] : starts[index + 1]]

    def document(self, chunk: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and loss mask of a document."""
        flat = self.marked(chunk, index)
        return (flat & ~LEARNED).astype(np.int64), flat >= LEARNED

    def _file(self, chunk: int, suffix: str) -> Path:
        if not self.has(chunk):
            raise IndexError(f"{self.folder} has no chunk {chunk}")
        return _file(self.folder, chunk, suffix)


def mapped(file: Path) -> np.ndarray:
    """A one-dimensional uint32 array, memory-mapped and shared between ranks.

    Not `np.load(mmap_mode="r")`: Python's mappings keep their file open, and a mixture of sources would reach the usual
    limit of 1,024 open files; torch's do not (and take 30 µs instead of 260).
    """
    import torch

    content = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8).numpy()
    return _values(content, np.dtype(np.uint32))


def _values(content: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What is in a one-dimensional .npy file of version 1: magic, version, the header's length, header, values.

    numpy parses the header as Python, which fails now and then in Python 3.11 if two threads do so (cpython gh-106905).
    """
    header = 10 + int(content[8:10].view("<u2")[0])
    return content[header:].view(dtype)
