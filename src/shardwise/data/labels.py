"""The classes of a classifier: what a label is called, which class it is, and which ones the training data have.

A label is a word, a whole number or true/false, and is called by its text. Data that number their classes while the
classes have names (`objective.labels: [negative, positive]` and rows with 0 and 1) mean the names' places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from shardwise.config.schema import Data
from shardwise.core.errors import UserError
from shardwise.data.examples import BadRow
from shardwise.data.files import read_chunk

MOST = 10_000  # classes; more are no classes but texts
_WHOLE = re.compile(r"-?\d+")


def label_name(value: Any) -> str | None:
    """What a label is called; None if it is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return str(value)
    return value.strip() or None if isinstance(value, str) else None


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Classes in their order: numbers by size, words by the alphabet."""
    found = set(names)
    return tuple(sorted(found, key=int) if all(map(_WHOLE.fullmatch, found)) else sorted(found))


def class_of(name: str, labels: Sequence[str]) -> int | None:
    """The number of a class; None if there is no such class."""
    if name in labels:
        return labels.index(name)
    if name.isdecimal() and int(name) < len(labels) and not any(map(_WHOLE.fullmatch, labels)):
        return int(name)
    return None


def collect_labels(data: Data) -> tuple[str, ...]:
    """The classes of the training sources, in order; reads them through once."""
    from shardwise.data.formats import understand
    from shardwise.data.tokenise import Spec, look

    names: set[str] = set()
    for index, source in enumerate(data.train):
        detected, tasks = look(Spec(f"data.train.{index}", index, source, data, 0, 0.0, purpose="classify"))
        for task in tasks:
            for raw in read_chunk(task):
                if isinstance(raw, BadRow):
                    continue  # told when the rows are rendered, as data.on_bad_row says
                try:
                    names.add(understand(raw, detected, source).category)
                except BadRow:
                    continue
            if len(names) > MOST:
                problem = f"has more than {MOST:,} different labels"
                raise UserError(f"data.train.{index}", source.path, problem, "set fields: {label: …} to the classes")
    if len(names) < 2:
        problem = f"all rows have the label {min(names)}" if names else "no row has a label"
        raise UserError(
            "data.train", data.train[0].path, problem, "check fields, or name the classes: objective.labels"
        )
    return ordered(names)
