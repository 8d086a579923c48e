"""Rules that decide whether a generated answer is right."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Sequence
from typing import Any

import regex

from shardwise.core.errors import UserError
from shardwise.evaluate.settings import GenerateTask

PATIENCE = 1.0  # seconds that a user's pattern may take on one answer
NUMBER = regex.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
CLOSING = ".,;:!?'\"`)*"


def normal(text: str) -> str:
    """Normalises a text: case, runs of blanks, quotes and punctuation around it."""
    flat = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return flat.strip(CLOSING + "(").strip()


def last_number(text: str) -> float | None:
    """Returns the last number in a text, with or without thousands separators."""
    numbers = [m.group() for m in NUMBER.finditer(text) if any(c.isdigit() for c in m.group())]
    return float(numbers[-1].replace(",", "")) if numbers else None


class Scorer:
    """The scorer of a task, its patterns compiled once."""

    def __init__(self, task: GenerateTask) -> None:
        self._task = task
        self._pattern = _compiled("pattern", task.pattern)
        self._extract = _compiled("extract", task.extract)

    @property
    def needs_answer(self) -> bool:
        """Whether a row must have an expected answer."""
        return self._task.scorer != "json" and self._pattern is None

    def __call__(self, output: str, expected: Sequence[str]) -> bool:
        """Whether the output is right; any of the expected answers will do."""
        text = self._part(output)
        if text is None:
            return False
        match self._task.scorer:
            case "exact":
                return normal(text) in {normal(w) for w in expected}
            case "contains":
                return any(normal(w) in normal(text) for w in expected)
            case "numeric":
                number = last_number(text)
                return number is not None and any(_same(number, last_number(w)) for w in expected)
            case "json":
                return _is_json(text, self._task.keys)
            case "regex":
                patterns = [self._pattern] if self._pattern is not None else [_compiled("answer", w) for w in expected]
                return any(_search(p, text) for p in patterns)

    def _part(self, output: str) -> str | None:
        if self._extract is None:
            return output
        match = None
        for match in _timed(self._extract, output):  # noqa: B007
            pass
        return None if match is None else match.group(1 if self._extract.groups else 0)


def _compiled(field: str, pattern: str | None) -> Any:
    try:
        return None if pattern is None else regex.compile(pattern)
    except regex.error as error:
        raise UserError(
            field, pattern, f"is no valid pattern ({error})", "mend it; \\ before a sign takes it as it is"
        ) from None


def _timed(pattern: Any, text: str) -> list[Any]:
    try:
        return list(pattern.finditer(text, timeout=PATIENCE))
    except TimeoutError:
        raise UserError("pattern", pattern.pattern, "takes too long on an answer", "simplify it") from None


def _search(pattern: Any, text: str) -> bool:
    return bool(_timed(pattern, text))


def _same(number: float, expected: float | None) -> bool:
    return expected is not None and math.isclose(number, expected, rel_tol=1e-6, abs_tol=1e-9)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_json(text: str, keys: Sequence[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return not keys or (isinstance(value, dict) and set(keys) <= set(value))
