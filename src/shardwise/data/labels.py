"""Class labels: their names, their indices, and the set found in the training data.

A label is a word, an integer or true/false, and is named by its text. If the classes have names
(`objective.labels: [negative, positive]`) and rows have 0 and 1, these are indices into the names.
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
    """Name of a label; None if the value is not a label."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return str(value)
    return value.strip() or None if isinstance(value, str) else None


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: integers numerically, words alphabetically."""
    unique = set(names)
    return tuple(sorted(unique, key=int) if all(map(_WHOLE.fullmatch, unique)) else sorted(unique))


def class_of(name: str, labels: Sequence[str]) -> int | None:
    """Index of a class; None if there is no such class."""
    if name in labels:
        return labels.index(name)
    if name.isdecimal() and int(name) < len(labels) and not any(map(_WHOLE.fullmatch, labels)):
        return int(name)
    return None


def collect_labels(data: Data) -> tuple[str, ...]:
    """Classes of the training sources in order, found by reading them in full."""
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
