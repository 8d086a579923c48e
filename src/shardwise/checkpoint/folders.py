"""The names of checkpoints on disk; torch is not loaded for them."""

from __future__ import annotations

import shutil
from pathlib import Path

PREFIX = "step-"
DAMAGED = "damaged-"  # before the name of a checkpoint that was put aside


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"{PREFIX}{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Completed-looking checkpoints of a run, oldest first."""
    return sorted(p for p in root.glob(f"{PREFIX}*") if p.is_dir())


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's name tells."""
    step = folder.name.removeprefix(PREFIX)
    return int(step) if step.isdecimal() else None


def newest_step(root: Path) -> int:
    """Of a run's checkpoints; -1 where there is none."""
    return max((step for folder in list_checkpoints(root) if (step := step_of(folder)) is not None), default=-1)


def put_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint, so that none goes on from it and it can still be looked at; where it lies then."""
    target = folder.with_name(f"{DAMAGED}{folder.name}")
    shutil.rmtree(target, ignore_errors=True)  # the same step, damaged before: the last of them is kept
    return folder.rename(target)
