"""Interface of the loop to synchronisation with other workers between steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NoSync:
    """A run that trains without other workers."""

    notes: tuple[str, ...] = ()

    def due(self, step: int, last: bool) -> bool:
        """Whether this step ends with a synchronisation: never."""
        return False

    def meet(
        self, last: bool, stopping: Callable[[], bool], tell: Callable[[str], None]
    ) -> dict[str, Any]:
        """Synchronises; never called here."""
        raise AssertionError("there are no other workers")

    def __enter__(self) -> NoSync:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        pass


def no_sync(state: Any) -> NoSync:
    """Returns the synchronisation of a run that trains alone; DiLoCo runs must pass their own."""
    assert state.job.run.diloco is None, "a DiLoCo run needs diloco.worker.join_others"
    return NoSync()
