"""One test over many small items: all are tried, and the failure names those that do not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def check_each(items: Iterable[Any], check: Callable[[Any], None], name: Callable[[Any], str] = str) -> None:
    """Calls `check` with every item; there must be some."""
    count, failures = 0, []
    for item in items:
        count += 1
        try:
            check(item)
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            failures.append(f"{name(item)}: {type(error).__name__}: {error}")
    assert count, "there is nothing to check"
    assert not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)
