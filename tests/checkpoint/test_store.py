"""What is written with each checkpoint besides the tensors."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.checkpoint.store import CheckpointStore, check_whole


def test_the_model_s_files_are_made_once(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """All ranks wait for them, and a tokenizer takes long to write out."""
    times = []

    def write(folder: Path) -> None:
        times.append(folder)
        (folder / "config.json").write_text("{}")
        (folder / "templates").mkdir()
        (folder / "templates/tool.jinja").write_text("tool")

    store = CheckpointStore(tmp_path, keep=3, background=True, group=group)
    for step in (1, 2, 3):
        store.save(step, {"w": torch.full((4,), float(step))}, {"step": step}, "{}", write, None)
    store.wait()
    assert len(times) == 1
    for step in (1, 2, 3):
        folder = tmp_path / f"step-{step:08d}"
        check_whole(folder)
        assert (folder / "model/config.json").read_text() == "{}"
        assert (folder / "model/templates/tool.jinja").read_text() == "tool"
