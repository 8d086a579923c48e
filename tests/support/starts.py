"""Small checkpoints, and what ranks choose of them that do not see the same."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from shardwise.checkpoint.copies import NoMemoryCheckpoints
from shardwise.checkpoint.integrity import digest_file, write_manifest
from shardwise.train import resume


def checkpoint(root: Path, step: int, files: int = 3) -> Path:
    """A folder with a manifest, whole."""
    folder = root / f"step-{step:08d}"
    folder.mkdir(parents=True)
    for number in range(files):
        (folder / f"part-{number}").write_text(f"{step} {number}")
    write_manifest(folder, {file.name: digest_file(file) for file in folder.glob("part-*")})
    return folder


def chosen(root: Path) -> tuple[str, list[str], list[str]]:
    """What this rank goes on from, what was passed over, and the files that are damaged; the second sees no folder."""
    if dist.get_rank() == 1:
        resume.list_checkpoints = lambda _: []  # a shared file system that is slow to tell
    start = resume.find_start("auto", root, NoMemoryCheckpoints(), dist.group.WORLD)
    assert start.folder is not None
    damage = [str(file) for one in start.damaged for file in one.damage]
    return start.folder.name, [one.name for one in start.damaged], damage
