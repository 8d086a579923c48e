"""The result of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """Last step and losses of a finished run, its records, and where its model is."""

    step: int
    loss: float | None
    eval_loss: float | None
    model: Path
    metrics: list[dict[str, Any]]
    check: str | None = None  # result of comparing the exported folder with the trained model
    exported: str | None = None  # name of the exported checkpoint
    foresight: str | None = None  # measurements beside the predictions
    notes: tuple[str, ...] = ()  # further remarks of the export
