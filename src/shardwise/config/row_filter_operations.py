"""Operators and functions of row filters, and the messages for unsupported values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.core.words import words_of

Number = int | float


class Undecided(Exception):
    """The filter cannot be evaluated on this row."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy


def kind_of(value: Any) -> str:
    """Type of a value, for messages."""
    if value is None:
        return "None (missing)"
    kinds = {bool: "true or false", str: "text", int: "a number", float: "a number", list: "a list", tuple: "a list"}
    return kinds.get(type(value), "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}")


def as_number(value: Any, source: str) -> Number:
    if isinstance(value, (int, float)):
        return value
    remedy = f"write float({source.strip('`')})" if isinstance(value, str) else "guard it, e.g. x is not None and …"
    raise Undecided(f"{source} is {kind_of(value)}, not a number", remedy)


def as_text(value: Any, source: str) -> str:
    if isinstance(value, str):
        return value
    remedy = "guard it, e.g. x is not None and …" if value is None else f"write str({source.strip('`')})"
    raise Undecided(f"{source} is {kind_of(value)}, not text", remedy)


def as_list(value: Any, source: str) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return value
    raise Undecided(f"{source} is {kind_of(value)}, not a list", "any and all look at lists")


def equal(left: Any, right: Any, first: str, second: str) -> bool:
    for text, number, source in ((left, right, first), (right, left, second)):
        if isinstance(text, str) and isinstance(number, (int, float)):
            problem = f"{first} == {second} compares {kind_of(left)} with {kind_of(right)}, which is never equal"
            raise Undecided(problem, f"write float({source.strip('`')}), or put the number in quotes")
    return bool(left == right)


def within(left: Any, right: Any, first: str, second: str) -> bool:
    if isinstance(right, str):
        return as_text(left, first) in right
    if isinstance(right, Mapping):
        return isinstance(left, (str, int, float)) and left in right
    if isinstance(right, (list, tuple)):
        return any(equal(left, item, first, second) for item in right)
    raise Undecided(f"{second} is {kind_of(right)}, in which nothing can be", "guard it, e.g. x is not None and …")


def _ordered(act: Callable[[Any, Any], bool]) -> Callable[[Any, Any, str, str], bool]:
    def test(left: Any, right: Any, first: str, second: str) -> bool:
        if isinstance(left, str) and isinstance(right, str):
            return act(left, right)
        return act(as_number(left, first), as_number(right, second))

    return test


def _convert(to: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value is not None and not isinstance(value, (str, int, float)):
            raise TypeError
        return to(value)

    return convert


def _of_texts(act: Callable[..., Any]) -> Callable[..., Any]:
    def of_texts(*values: Any) -> Any:
        if not all(isinstance(value, str) for value in values):
            raise TypeError
        return act(*values)

    return of_texts


def _extreme(act: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*values: Any) -> Any:
        items = values[0] if len(values) == 1 else values
        if not isinstance(items, (list, tuple)) or not items:
            raise TypeError
        if not all(isinstance(v, str) for v in items) and not all(isinstance(v, (int, float)) for v in items):
            raise TypeError
        return act(items)

    return extreme


def _absolute(value: Any) -> Number:
    if not isinstance(value, (int, float)):
        raise TypeError
    return abs(value)


def _contains(container: Any, part: Any) -> bool:
    if isinstance(container, str) and not isinstance(part, str):
        raise TypeError
    if not isinstance(container, (str, list, tuple)):
        raise TypeError
    return part in container


ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any, str, str], bool]] = {
    ast.Eq: equal,
    ast.NotEq: lambda a, b, first, second: not equal(a, b, first, second),
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.Is: lambda a, b, *_: a is b,
    ast.IsNot: lambda a, b, *_: a is not b,
    ast.In: within,
    ast.NotIn: lambda a, b, first, second: not within(a, b, first, second),
}
# name → fewest and most arguments, and what it does
FUNCTIONS: dict[str, tuple[int, int, Callable[..., Any]]] = {
    "len": (1, 1, len),
    "words": (1, 1, _of_texts(lambda text: len(words_of(text)))),
    "lower": (1, 1, _of_texts(str.lower)),
    "upper": (1, 1, _of_texts(str.upper)),
    "strip": (1, 1, _of_texts(str.strip)),
    "startswith": (2, 2, _of_texts(str.startswith)),
    "endswith": (2, 2, _of_texts(str.endswith)),
    "contains": (2, 2, _contains),
    "int": (1, 1, _convert(int)),
    "float": (1, 1, _convert(float)),
    "str": (1, 1, _convert(str)),
    "abs": (1, 1, _absolute),
    "min": (1, 20, _extreme(min)),
    "max": (1, 20, _extreme(max)),
}
