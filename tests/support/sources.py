"""Reads a source as a run does: chunks through pickle as between processes, detection, understanding."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from shardwise.config.schema import Source
from shardwise.data.examples import BadRow, Example, Raw
from shardwise.data.files import chunk_tasks, read_chunk
from shardwise.data.formats import SAMPLE, Detected, detect, understand

FIELD = "data.train.0"


@dataclass(frozen=True)
class Taken:
    """What became of a source's rows."""

    detected: Detected | None
    examples: list[Example]
    bad: list[BadRow]


def raw_rows(path: str, **settings: Any) -> list[Raw | BadRow]:
    """The rows of a source, numbered as they must be."""
    rows: list[Raw | BadRow] = []
    for index, task in enumerate(chunk_tasks(Source(path=path, **settings), FIELD)):
        assert task.index == index
        assert not rows or task.first_row > rows[-1].number
        rows += read_chunk(pickle.loads(pickle.dumps(task)))
    return rows


def take(path: str, **settings: Any) -> Taken:
    """The examples of a source and its bad rows, in order."""
    source = Source(path=path, **settings)
    rows = raw_rows(path, **settings)
    raws = [row for row in rows if isinstance(row, Raw)]
    bad = [row for row in rows if isinstance(row, BadRow)]
    if not raws and bad:
        return Taken(None, [], bad)
    detected = pickle.loads(pickle.dumps(detect(raws[:SAMPLE], source, FIELD)))
    examples = []
    for raw in raws:
        try:
            examples.append(understand(raw, detected, source))
        except BadRow as error:
            bad.append(pickle.loads(pickle.dumps(error)))
    return Taken(detected, examples, sorted(bad, key=lambda b: b.number))
