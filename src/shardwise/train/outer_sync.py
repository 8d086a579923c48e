"""Synchronisation with other workers between steps (DiLoCo), as the loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NoSync:
    """A run that meets nobody."""

    notes: tuple[str, ...] = ()

    def due(self, step: int, last: bool) -> bool:
        """Never."""
        return False

    def meet(self, last: bool, stopping: Callable[[], bool], tell: Callable[[str], None]) -> dict[str, Any]:
        """Never asked for."""
        raise AssertionError("nobody to meet")

    def __enter__(self) -> NoSync:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        pass
