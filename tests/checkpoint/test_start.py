"""What a run goes on from: the newest that is whole, on disk or in memory, and the same one on every rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import run_ranks
from support.starts import checkpoint, chosen

from shardwise.checkpoint.copies import NoMemoryCheckpoints
from shardwise.core.errors import UserError
from shardwise.train.resume import damage_records, damage_warnings, find_start


class Memory(NoMemoryCheckpoints):
    """One copy, of a step."""

    def __init__(self, step: int) -> None:
        self.step, self.asked = step, list[int]()

    def find(self, beyond: int) -> Any:
        self.asked.append(beyond)
        return SimpleNamespace(step=self.step, folder=Path(f"/copies/{self.step}")) if self.step > beyond else None

    def reader(self, copy: Any) -> Any:
        return "reader"


def names(root: Path) -> list[str]:
    return sorted(folder.name for folder in root.iterdir())


def test_ranks_agree_though_they_see_different_folders(tmp_path: Path) -> None:
    """Three ranks share the files: each finds one damaged, or none, and all pass over the same two checkpoints."""
    for step in (2, 4, 6):
        checkpoint(tmp_path, step)
    (tmp_path / "step-00000006/manifest.json").write_text("{}")
    (tmp_path / "step-00000004/part-1").write_text("else")
    results = run_ranks(chosen, 3, tmp_path)
    assert results[0] == results[1] == results[2]
    name, passed, damage = results[0]
    assert name == "step-00000002" and passed == ["step-00000006", "step-00000004"] and len(damage) == 2
    assert names(tmp_path) == ["damaged-step-00000004", "damaged-step-00000006", "step-00000002"]


def test_nothing_is_put_aside_where_none_is_whole(tmp_path: Path, group: dist.ProcessGroup) -> None:
    for step in (2, 4):
        (checkpoint(tmp_path, step) / "part-0").unlink()
    with pytest.raises(UserError, match=r"step-00000004.part-0 is missing; it was not loaded\n.*resume=never"):
        find_start("auto", tmp_path, NoMemoryCheckpoints(), group)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    assert find_start("auto", tmp_path / "empty", NoMemoryCheckpoints(), group).folder is None


def test_a_copy_in_memory_counts_as_a_checkpoint(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """One that is newer than all on disk is taken, and those are not looked at; else one between damaged and whole."""
    for step in (2, 6):
        checkpoint(tmp_path, step)
    (tmp_path / "step-00000006/part-0").unlink()
    newer = find_start("auto", tmp_path, Memory(7), group)
    assert newer.place == "the copy of step 7 in memory" and newer.reader == "reader" and not newer.damaged
    assert names(tmp_path) == ["step-00000002", "step-00000006"]
    memory = Memory(5)
    between = find_start("auto", tmp_path, memory, group)
    assert memory.asked == [6, 2] and between.place == "the copy of step 5 in memory"
    assert names(tmp_path) == ["damaged-step-00000006", "step-00000002"]
    (line,) = damage_warnings(between, 5)
    assert "part-0 is missing" in line and "from the copy of step 5 in memory: 1 step is lost and done again" in line
    (record,) = damage_records(between, 5)
    assert record["kind"] == "damaged" and record["lost_steps"] == 1 and record["from"] == between.place


def test_one_by_its_name_is_strict(tmp_path: Path, group: dist.ProcessGroup) -> None:
    first, second = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    (second / "part-0").unlink()
    with pytest.raises(UserError, match="the previous good one is"):
        find_start(str(second), tmp_path, Memory(9), group)
    assert find_start(str(first), tmp_path, Memory(9), group).folder == first
    assert find_start("never", tmp_path, Memory(9), group).folder is None
    assert names(tmp_path) == [first.name, second.name]
