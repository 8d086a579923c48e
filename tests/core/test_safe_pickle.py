"""A checkpoint is data: one that would run code, or reach outside its folder, is refused before anything happens."""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.checkpoint.store import load_tensors
from shardwise.core.errors import UserError
from shardwise.core.safe_pickle import SafeReader, read_index
from shardwise.distributed.lazy_rows import LoadRows


class Bomb:
    """Touches a file when it is read as a pickle."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000001"
    save({"model.a": torch.arange(6.0)}, checkpoint_id=folder / "state", no_dist=True)
    return folder


def test_ours_is_read(checkpoint: Path) -> None:
    into = {"model.a": torch.zeros(6)}
    load_tensors(checkpoint, into, None)
    assert into["model.a"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_bomb_in_the_index(checkpoint: Path, tmp_path: Path, wrapped: bool) -> None:
    index = checkpoint / "state/.metadata"
    bomb: Any = Bomb(tmp_path / "mark")
    if wrapped:
        bomb = replace(pickle.loads(index.read_bytes()), planner_data=bomb)
    index.write_bytes(pickle.dumps(bomb))
    with pytest.raises(UserError, match=r"names posix\.system.*nothing in it was run"):
        load_tensors(checkpoint, {"model.a": torch.zeros(6)}, None)
    assert not (tmp_path / "mark").exists()


def test_other_bytes(checkpoint: Path) -> None:
    for data in (b"", b"no pickle", pickle.dumps({"a": 1})):
        with pytest.raises(UserError, match="no index of tensors"):
            read_index(data, checkpoint)


def test_files_outside(checkpoint: Path) -> None:
    metadata = SafeReader(checkpoint / "state").read_metadata()
    for name in ("/etc/passwd", "../../elsewhere"):
        entries = {key: replace(info, relative_path=name) for key, info in metadata.storage_data.items()}
        data = pickle.dumps(replace(metadata, storage_data=entries))
        with pytest.raises(UserError, match="a file outside it"):
            read_index(data, checkpoint)


def test_a_bomb_in_a_tensor_file(checkpoint: Path, tmp_path: Path) -> None:
    """PyTorch reads these with weights_only; if that should change, this fails."""
    (file,) = (checkpoint / "state").glob("__0_0*")
    buffer = io.BytesIO()
    torch.save(Bomb(tmp_path / "mark"), buffer)
    file.write_bytes(buffer.getvalue().ljust(file.stat().st_size, b"\0"))
    with pytest.raises((UserError, Exception)):
        load_tensors(checkpoint, {"model.a": torch.zeros(6)}, None)
    assert not (tmp_path / "mark").exists()


def test_objects_are_refused() -> None:
    item: Any = type("Item", (), {"dest_index": type("Index", (), {"fqn": "step"})})
    with pytest.raises(UserError, match="is no tensor"):
        LoadRows({}).load_bytes(item, io.BytesIO(pickle.dumps(1)))
