"""A source's tokens on disk, in chunks that can be read while later ones are still being made.

[Note: chunks] Rows are tokenised in chunks of consecutive rows. A chunk is two arrays: the tokens of its documents one
after the other, with the top bit set where a token is learned, and a table of its documents. The table is renamed into
place last, so a chunk that is there is whole. `done.json` tells how many there are; `failed.json` that there will be no
more, and why. Readers map the arrays: what a run holds in memory does not grow with the source.
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
    """Stores a chunk; whoever sees it sees all of it."""
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
    """Whether a chunk is there."""
    return _file(folder, index, "table").is_file()


def finish(folder: Path, chunks: int, facts: dict[str, Any]) -> None:
    """Says that all chunks are there, and what is known of the whole."""
    write_json(folder / "done.json", {"chunks": chunks} | facts)


def fail(folder: Path, error: UserError) -> None:
    """Says that there will be no more, and why."""
    write_json(folder / "failed.json", {"args": [error.field, error.value, error.problem, error.remedy]})


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Whoever sees the file sees all of it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, default=str))
    partial.rename(file)


def _file(folder: Path, index: int, suffix: str) -> Path:
    return folder / f"{index:07}.{suffix}.npy"


class TokenStore:
    """The documents of one source, by chunk and place within it; waits for chunks that are still being made."""

    def __init__(self, folder: Path, alive: Callable[[], bool] = lambda: True) -> None:
        self.folder, self._alive = folder, alive
        self._facts: dict[str, Any] | None = None
        self._tables: OrderedDict[int, np.ndarray] = OrderedDict()
        self._tokens: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    @property
    def facts(self) -> dict[str, Any] | None:
        """What is known of the whole; None while it is being made."""
        if self._facts is None and (self.folder / "done.json").is_file():
            self._facts = json.loads((self.folder / "done.json").read_text())
        return self._facts

    def ready(self, chunk: int) -> bool | None:
        """Whether there is such a chunk; None while that cannot be told yet."""
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
        """Whether there is such a chunk; waits until it is there or the source has come to its end."""
        while (answer := self.ready(chunk)) is None:
            time.sleep(POLL)
        return answer

    def wait(self) -> dict[str, Any]:
        """Waits for the whole and gives its facts."""
        while self.facts is None:
            self.has(1 << 60)
        return self.facts

    def table(self, chunk: int) -> np.ndarray:
        """Length, learned tokens and row number of each document of a chunk."""
        if chunk not in self._tables:
            self._tables[chunk] = np.load(self._file(chunk, "table"))
            if len(self._tables) > OPEN:
                self._tables.popitem(last=False)
        self._tables.move_to_end(chunk)
        return self._tables[chunk]

    def marked(self, chunk: int, index: int) -> np.ndarray:
        """A document's tokens as they are stored, the top bit set where one is learned; not to be written to."""
        if chunk not in self._tokens:
            starts = np.concatenate([[0], np.cumsum(self.table(chunk)["length"], dtype=np.int64)])
            self._tokens[chunk] = mapped(self._file(chunk, "tokens")), starts
            if len(self._tokens) > OPEN:
                self._tokens.popitem(last=False)
        self._tokens.move_to_end(chunk)
        flat, starts = self._tokens[chunk]
        return flat[starts[index] : starts[index + 1]]

    def document(self, chunk: int, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and which of them are learned."""
        flat = self.marked(chunk, index)
        return (flat & ~LEARNED).astype(np.int64), flat >= LEARNED

    def _file(self, chunk: int, suffix: str) -> Path:
        if not self.has(chunk):
            raise IndexError(f"{self.folder} has no chunk {chunk}")
        return _file(self.folder, chunk, suffix)


def mapped(file: Path) -> np.ndarray:
    """A one-dimensional array of uint32 in memory that the ranks share.

    Not `np.load(mmap_mode="r")`: Python's mappings keep their file open, and a mixture of sources would come to the
    usual limit of 1,024 open files; torch's do not (and take 30 µs instead of 260).
    """
    import torch

    content = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8).numpy()
    header = 10 + int(content[8:10].view("<u2")[0])  # of .npy version 1: magic, version, then the header's length
    return content[header:].view(np.uint32)
