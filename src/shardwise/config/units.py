"""Parses values with units: `2%`, `1e-4`, `4GiB`, `200ms`, `50` steps or `10min`.

YAML reads `1e-4` and `2%` as strings, so every numeric field of the schema also accepts its textual form.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

_SIZE = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
_TIME = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*)?\.?\d+(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)\s*")


def _split(value: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(value)
    number = float(match[1].replace("_", "")) if match else math.inf
    if not match or math.isinf(number):
        raise ValueError("not a number")
    return number, match[2]


def _refuse_bool(value: Any, expected: str) -> None:
    # Python counts True as 1, and YAML reads `yes` and `on` as True.
    if isinstance(value, bool):
        raise ValueError(f"expected {expected}, not true or false")


def parse_number(value: Any) -> Any:
    """Converts "1e-4" and "1_000" to numbers; other values are left to pydantic."""
    _refuse_bool(value, "a number")
    if isinstance(value, str):
        try:
            number, unit = _split(value)
        except ValueError:
            return value
        if not unit:
            return int(number) if number.is_integer() and not re.search(r"[.eE]", value) else number
    return value


def parse_share(value: Any) -> Any:
    """Converts "2%" to 0.02; numbers are returned unchanged."""
    expected = "a share such as 2% or 0.02"
    _refuse_bool(value, expected)
    if isinstance(value, str):
        number, unit = _guard(value, expected)
        if unit not in ("", "%"):
            raise ValueError(f"unknown unit {unit!r}: write {expected}")
        return number / 100 if unit else number
    return value


def parse_size(value: Any) -> Any:
    """Converts "4GiB" to bytes; a bare integer is bytes."""
    expected = "a size such as 4GiB or 500MB"
    _refuse_bool(value, expected)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"expected {expected}")
    if isinstance(value, str):
        number, unit = _guard(value, expected)
        if unit and unit.lower() not in _SIZE:
            raise ValueError(f"unknown unit {unit!r}: use B, KB, MB, GB, KiB, MiB or GiB")
        return int(number * _SIZE.get(unit.lower(), 1))
    return value


def parse_duration(value: Any) -> Any:
    """Converts "200ms" or "10min" to seconds; a bare number is seconds."""
    expected = "a duration such as 200ms, 30s or 10min"
    _refuse_bool(value, expected)
    if isinstance(value, str):
        number, unit = _guard(value, expected)
        if unit and unit.lower() not in _TIME:
            raise ValueError(f"unknown unit {unit!r}: use ms, s, min, h or d")
        return number * _TIME.get(unit.lower(), 1.0)
    return value


def human(size: float) -> str:
    """Formats a number of bytes: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def in_words(seconds: float) -> str:
    """Formats a duration: 45s, 30min, 1.5h."""
    for unit in ("d", "h", "min"):
        if seconds >= _TIME[unit] and seconds % (_TIME[unit] / 2) == 0:
            return f"{seconds / _TIME[unit]:g}{unit}"
    return f"{seconds:g}s" if seconds >= 1 or not seconds else f"{seconds * 1e3:g}ms"


def _guard(value: str, expected: str) -> tuple[float, str]:
    try:
        return _split(value)
    except ValueError:
        raise ValueError(f"expected {expected}") from None


def is_quantity(text: str) -> bool:
    """Whether a text reads as a number, with or without a unit, rather than as a path."""
    return _QUANTITY.fullmatch(text) is not None


class Every(str):
    """An interval: a number of steps ("50") or a time ("10min")."""

    @property
    def steps(self) -> int | None:
        number, unit = _split(self)
        return None if unit else int(number)

    @property
    def seconds(self) -> float | None:
        number, unit = _split(self)
        return number * _TIME[unit.lower()] if unit else None


def parse_every(value: Any) -> Every:
    """Parses 50 (steps) or "10min" (time)."""
    expected = "a number of steps such as 50, or a time such as 10min"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"expected {expected}")
    number, unit = _guard(str(value), expected)
    if unit and unit.lower() not in _TIME:
        raise ValueError(f"unknown unit {unit!r}: use steps (no unit), s, min or h")
    if number <= 0 or (not unit and not number.is_integer()):
        raise ValueError(f"expected {expected}, above 0")
    return Every(str(value).strip() if unit else int(number))


class Portion(str):
    """A part of the run, as written: a fraction ("3%", "0.03") or a number of steps ("100")."""

    def steps(self, total: int) -> int:
        """Number of steps, in a run of `total` steps."""
        number, unit = _split(self)
        share = number / 100 if unit else number
        return round(share * total) if unit or number < 1 else int(number)


def parse_portion(value: Any) -> Portion:
    """Parses 3% (of the run) or 100 (steps); 100% is the full run and 1 is one step."""
    expected = "a share such as 3% or a whole number of steps such as 100"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"expected {expected}")
    number, unit = _guard(str(value), expected)
    if unit not in ("", "%"):
        raise ValueError(f"unknown unit {unit!r}: write {expected}")
    if number < 0 or (number > 100 if unit else number >= 1 and not number.is_integer()):
        raise ValueError(f"expected {expected}")
    if unit:
        return Portion(str(value).strip())
    return Portion(int(number) if number.is_integer() else number)


def _plain_portion(value: Portion) -> int | float | str:
    number, unit = _split(value)
    if unit:
        return str(value)
    return int(number) if number.is_integer() else number


def _schema(kind: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}], "description": f"{kind}, e.g. {example}"})


Number = Annotated[float, BeforeValidator(parse_number)]
Whole = Annotated[int, BeforeValidator(parse_number)]
# Bounds inside: around a validator, and within a union, pydantic leaves them out of the JSON schema.
Positive = Annotated[float, Field(gt=0), BeforeValidator(parse_number)]
Ahead = Annotated[int, Field(ge=0, le=8), BeforeValidator(parse_number)]
Count = Annotated[int, Field(ge=1), BeforeValidator(parse_number)]
Share = Annotated[float, BeforeValidator(parse_share), _schema("share", "2%")]
Size = Annotated[int, BeforeValidator(parse_size), _schema("size", "4GiB")]
SomeSize = Annotated[int, Field(ge=1), BeforeValidator(parse_size), _schema("size", "200MB")]
Duration = Annotated[float, BeforeValidator(parse_duration), _schema("duration", "200ms or 10min")]
Interval = Annotated[
    Any,
    BeforeValidator(parse_every),
    PlainSerializer(lambda e: e.steps if e.steps is not None else str(e)),
    _schema("steps or time", "50 or 10min"),
]
Span = Annotated[
    Any,
    BeforeValidator(parse_portion),
    PlainSerializer(_plain_portion),
    _schema("share of the run or steps", "3% or 100"),
]
