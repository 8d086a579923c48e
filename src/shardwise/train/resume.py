"""What a run goes on from: the newest whole state, on disk or in memory, and the same one on every rank.

With `resume: auto` a damaged checkpoint is put aside where an earlier one is whole, and the run goes on from that: a
scheduler starts the same command again and nobody reads its messages. One that was given by its name is meant: if it is
damaged the run ends, as it does where nothing whole is left.
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
    """A checkpoint that was put aside."""

    name: str
    step: int
    damage: list[Damage]


@dataclass(frozen=True)
class Start:
    """A verified state, or none to start afresh; `reader` of a copy in memory; what was put aside on the way."""

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
    """Chooses and verifies, the ranks together; raises UserError where what is there cannot be gone on from."""
    if resume != "auto":
        folder = choose_checkpoint(resume, root)
        if folder is not None:
            check_whole(folder, group)
        return Start(folder)
    folders = _as_main_sees(root, group)
    if (start := _in_memory(copies, folders[0] if folders else None, ())) is not None:
        return start
    damaged: list[Damaged] = []
    for folder in folders:
        if not (damage := damage_in(folder, group)):
            break
        damaged.append(Damaged(folder.name, step_of(folder) or 0, damage))
    if not damaged:
        return Start(folders[0] if folders else None)
    whole = folders[len(damaged)] if len(damaged) < len(folders) else None
    start = _in_memory(copies, whole, tuple(damaged)) or Start(whole, damaged=tuple(damaged))
    if start.folder is None:  # nothing was renamed: whoever mends a file can go on from it
        raise refusal(folders[0], damaged[0].damage, None)
    if dist.get_rank(group) == 0:
        for one in damaged:
            put_aside(root / one.name)
    dist.barrier(group=group)
    return start


def _as_main_sees(root: Path, group: dist.ProcessGroup) -> list[Path]:
    """Checkpoints, newest first. Hosts may see a shared folder in different states for some seconds."""
    box = [[folder.name for folder in reversed(list_checkpoints(root))]]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return [root / name for name in box[0]]


def _in_memory(
    copies: MemoryCheckpoints | NoMemoryCheckpoints,
    beyond: Path | None,
    damaged: tuple[Damaged, ...],
) -> Start | None:
    """A copy in memory that is newer than this checkpoint."""
    step = step_of(beyond) if beyond is not None else None
    found = copies.find(beyond=-1 if step is None else step)
    if found is None:
        return None
    return Start(
        found.folder, copies.reader(found), f"the copy of step {found.step} in memory", damaged
    )


def told(start: Start, step: int) -> list[str]:
    """What to say of the checkpoints that were put aside, given the step that the run goes on from."""
    place = start.place or (start.folder.name if start.folder else "the beginning")
    lines = []
    for one in start.damaged:
        lost = max(0, one.step - step)
        again = f"{lost} step{'s are' if lost != 1 else ' is'} lost and done again"
        lines.append(
            f"WARNING: the checkpoint {one.name} is damaged: {in_words(one.damage)}\n"
            f"  put aside as damaged-{one.name}; going on from {place}: {again}"
        )
    return lines


def records(start: Start, step: int) -> list[dict[str, Any]]:
    """The same for metrics.jsonl."""
    return [
        {
            "kind": "damaged", "step": step, "checkpoint": one.name, "files": [str(d) for d in one.damage[:8]],
            "from": start.place or (start.folder.name if start.folder else None), "lost_steps": max(0, one.step - step),
            "time": time.time(),
        }
        for one in start.damaged
    ]  # fmt: skip
