"""What a finished run hands over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Result:
    """What a finished run hands over."""

    step: int
    loss: float | None
    eval_loss: float | None
    model: Path
    metrics: list[dict[str, Any]]
    check: str | None = None  # what comparing the exported folder with the trained model said
    exported: str | None = None  # the checkpoint that the model is of
    foresight: str | None = None  # what was measured beside what was predicted
    notes: tuple[str, ...] = ()  # what else the export reported
