"""Chooses the state that a run resumes from: the newest intact one, on disk or in memory.

All ranks choose the same one. With `resume: auto` a damaged checkpoint is renamed if an earlier one
is intact, and the run resumes from that: a scheduler restarts the same command and nobody reads its
messages. The run ends if no checkpoint is intact, or if the one given by name is damaged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint.copies import MemoryCheckpoints, NoMemoryCheckpoints
from shardwise.checkpoint.folders import list_checkpoints, put_aside, step_of
from shardwise.checkpoint.integrity import Damage
from shardwise.checkpoint.store import check_whole, choose_checkpoint, damage_in, in_words, refusal
from shardwise.core.safe_pickle import SafeReader


@dataclass(frozen=True)
class Damaged:
    """A damaged checkpoint that was renamed."""

    name: str
    step: int
    damage: list[Damage]


@dataclass(frozen=True)
class Start:
    """A verified state, or none to start afresh.

    `reader` is set for a copy in memory; `damaged` lists the checkpoints that were skipped.
    """

    folder: Path | None
    reader: SafeReader | None = None
    place: str = ""
    damaged: tuple[Damaged, ...] = ()


def find_start(
    resume: str,
    root: Path,
    copies: MemoryCheckpoints | NoMemoryCheckpoints,
    group: dist.ProcessGroup,
) -> Start:
    """Chooses and verifies a state, on all ranks together; raises UserError if none can be used."""
    if resume != "auto":
        folder = choose_checkpoint(resume, root)
        if folder is not None:
            check_whole(folder, group)
        return Start(folder)
    folders = _as_main_sees(root, group)
    newest = folders[0] if folders else None
    if (start := _in_memory(copies, newest, ())) is not None:
        return start
    damaged: list[Damaged] = []
    for folder in folders:
        if not (damage := damage_in(folder, group)):
            break
        damaged.append(Damaged(folder.name, step_of(folder) or 0, damage))
    if not damaged:
        return Start(newest)
    intact = folders[len(damaged)] if len(damaged) < len(folders) else None
    start = _in_memory(copies, intact, tuple(damaged)) or Start(intact, damaged=tuple(damaged))
    if start.folder is None:  # nothing is renamed: a run can resume once the files are repaired
        raise refusal(folders[0], damaged[0].damage, None)
    if dist.get_rank(group) == 0:
        for checkpoint in damaged:
            put_aside(root / checkpoint.name)
    dist.barrier(group=group)
    return start


def _as_main_sees(root: Path, group: dist.ProcessGroup) -> list[Path]:
    """Checkpoints, newest first, as the main rank sees them.

    Hosts may see a shared folder in different states for some seconds.
    """
    box = [[folder.name for folder in reversed(list_checkpoints(root))]]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return [root / name for name in box[0]]


def _in_memory(
    copies: MemoryCheckpoints | NoMemoryCheckpoints,
    beyond: Path | None,
    damaged: tuple[Damaged, ...],
) -> Start | None:
    """A copy in memory that is newer than this checkpoint."""
    step = None if beyond is None else step_of(beyond)
    copy = copies.find(beyond=-1 if step is None else step)
    if copy is None:
        return None
    place = f"the copy of step {copy.step} in memory"
    return Start(copy.folder, copies.reader(copy), place, damaged)


def damage_warnings(start: Start, step: int) -> list[str]:
    """Warnings about damaged checkpoints, given the step that the run resumes from."""
    place = _place(start) or "the beginning"
    warnings = []
    for checkpoint in start.damaged:
        name = checkpoint.name
        lost = max(0, checkpoint.step - step)
        steps = "1 step is" if lost == 1 else f"{lost} steps are"
        warnings.append(
            f"WARNING: the checkpoint {name} is damaged: {in_words(checkpoint.damage)}\n"
            f"  put aside as damaged-{name}; going on from {place}: {steps} lost and done again"
        )
    return warnings


def damage_records(start: Start, step: int) -> list[dict[str, Any]]:
    """The same as records for metrics.jsonl."""
    return [
        {
            "kind": "damaged",
            "step": step,
            "checkpoint": checkpoint.name,
            "files": [str(damage) for damage in checkpoint.damage[:8]],
            "from": _place(start),
            "lost_steps": max(0, checkpoint.step - step),
            "time": time.time(),
        }
        for checkpoint in start.damaged
    ]


def _place(start: Start) -> str | None:
    if start.place:
        return start.place
    return start.folder.name if start.folder else None
