"""Quantities as people write them, and what is said about those that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config.units import (
    Every,
    is_quantity,
    parse_duration,
    parse_every,
    parse_number,
    parse_portion,
    parse_share,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-4", 1e-4), ("2E5", 2e5), ("1_000", 1000), (" 12 ", 12), ("-3", -3), (".5", 0.5), ("+1_0.5", 10.5), (7, 7)],
)
def test_numbers(text: Any, number: float) -> None:
    assert parse_number(text) == number


def test_whole_numbers_stay_whole() -> None:
    assert isinstance(parse_number("1_000"), int)
    assert isinstance(parse_number("1e3"), float)  # pydantic takes 1000.0 for an integer, and refuses 1e-4


def test_what_is_no_number_is_left_to_pydantic() -> None:
    assert parse_number("auto") == "auto"
    assert parse_number("2%") == "2%"  # a share is not a plain number: learning_rate: 2% is a mistake
    assert parse_number("1e999") == "1e999"
    assert parse_number(None) is None


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.02", 0.02), (0.5, 0.5), ("100%", 1.0), (" 1e1 % ", 0.1)])
def test_shares(text: Any, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("1kb", 1000),
        (123, 123),
        ("64", 64),
        (2.0, 2),
        ("3 b", 3),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("200ms", 0.2),
        ("30s", 30),
        ("10min", 600),
        ("10m", 600),
        ("1.5h", 5400),
        ("1d", 86400),
        (7, 7),
        ("7", 7),
        ("1 H", 3600),
    ],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("value", "steps", "seconds"), [(50, 50, None), ("1_000", 1000, None), (1e2, 100, None), ("10min", None, 600)]
)
def test_intervals_are_steps_or_time(value: Any, steps: int | None, seconds: float | None) -> None:
    every = parse_every(value)
    assert (every.steps, every.seconds) == (steps, seconds)


def test_equal_intervals_are_equal_however_written() -> None:
    assert parse_every("1_000") == parse_every(1000) == parse_every(1e3) == Every("1000")


@pytest.mark.parametrize(
    ("value", "steps"),
    # Of 400 steps. 100% is all of them and 1 is one: the two must not be confused.
    [
        ("3%", 12),
        (0.03, 12),
        ("100%", 400),
        (1, 1),
        ("1", 1),
        (100, 100),
        ("0", 0),
        (0.0, 0),
        ("0%", 0),
        ("50 %", 200),
        (1e2, 100),
    ],
)
def test_portions_of_a_run(value: Any, steps: int) -> None:
    assert parse_portion(value).steps(400) == steps


@pytest.mark.parametrize(
    ("parse", "value", "words"),
    [
        (parse_share, "2 percent", "unknown unit 'percent'"),
        (parse_share, "much", "2% or 0.02"),
        (parse_share, True, "not true or false"),
        (parse_number, True, "not true or false"),
        (parse_size, "4G", "unknown unit 'G'"),
        (parse_size, "big", "4GiB"),
        (parse_size, 1.5, "4GiB"),
        (parse_size, "1e999", "4GiB"),
        (parse_size, False, "not true or false"),
        (parse_duration, "10 hours", "unknown unit 'hours'"),
        (parse_duration, "soon", "10min"),
        (parse_duration, "5%", "unknown unit '%'"),
        (parse_duration, True, "not true or false"),
        (parse_every, "10%", "unknown unit '%'"),
        (parse_every, 0, "above 0"),
        (parse_every, "-1min", "above 0"),
        (parse_every, 1.5, "above 0"),
        (parse_every, "often", "50"),
        (parse_every, True, "50"),
        (parse_every, [1], "50"),
        (parse_portion, "101%", "3%"),
        (parse_portion, 1.5, "whole number of steps"),
        (parse_portion, -1, "3%"),
        (parse_portion, "10min", "unknown unit 'min'"),
        (parse_portion, float("nan"), "3%"),
        (parse_portion, True, "3%"),
        (parse_portion, None, "3%"),
    ],
)
def test_bad_quantities_say_what_is_expected(parse: Any, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("%", "\\%")):
        parse(value)


def test_paths_are_no_quantities() -> None:
    assert all(map(is_quantity, ["2%", "0.02", "1e-2", " 5 % ", "7", "150%"]))
    assert not any(map(is_quantity, ["heldout.jsonl", "2.jsonl", "data/2", "", "%", "2%.txt"]))
