"""Names of checkpoints on disk; does not import torch."""

from __future__ import annotations

import shutil
from pathlib import Path

PREFIX = "step-"
DAMAGED = "damaged-"  # before the name of a checkpoint that was put aside


def step_folder(root: Path, step: int) -> Path:
    """Returns the folder of a step's checkpoint."""
    return root / f"{PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Returns the checkpoints of a run that look complete, oldest first."""
    return sorted(p for p in root.glob(f"{PREFIX}*") if p.is_dir())


def step_of(folder: Path) -> int | None:
    """Returns the step in a checkpoint's name; None if it has none."""
    step = folder.name.removeprefix(PREFIX)
    return int(step) if step.isdecimal() else None


def newest_step(root: Path) -> int:
    """Returns the newest step of a run's checkpoints; -1 if there is none."""
    return max((step for folder in list_checkpoints(root) if (step := step_of(folder)) is not None), default=-1)


def put_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint so that no run resumes from it, and returns its new path."""
    target = folder.with_name(f"{DAMAGED}{folder.name}")
    shutil.rmtree(target, ignore_errors=True)  # the same step, damaged before: the last of them is kept
    return folder.rename(target)
