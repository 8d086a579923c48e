"""How tensors become files: as PyTorch reads them, of the state at the save, planned once; and short of memory."""

from __future__ import annotations

import hashlib
import io
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import writing as support
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from shardwise.checkpoint import writing
from shardwise.checkpoint.files import TensorFiles
from shardwise.checkpoint.store import CheckpointStore, check_whole, load_tensors
from shardwise.checkpoint.writing import StateWriter
from shardwise.distributed.lazy_rows import LazyShardedTensor


def many_kinds() -> dict[str, torch.Tensor]:
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
    made = {str(kind): (torch.randn(5, 7) * 9).to(kind) for kind in [*kinds, torch.float8_e4m3fn]}
    made |= {"number": torch.tensor(3.5), "none": torch.empty(0, 4), "turned": torch.randn(4, 6).t()}
    return made | {"part": torch.randn(9, 3)[2:5], "large": torch.randn(3 << 18)}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.double().equal(b.double())


def test_torch_reads_what_is_written(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """By PyTorch's own reader, and each part of the file by torch.load; the hash is that of the file."""
    given = many_kinds()
    (files,) = StateWriter(group, True, True).begin(given).write(tmp_path)
    ((name, (size, digest)),) = files.items()
    assert (tmp_path / name).stat().st_size == size
    assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    found = {key: torch.zeros_like(value) for key, value in given.items()}
    dcp.load(found, checkpoint_id=tmp_path)
    assert all(same(found[key], given[key]) for key in given)
    index = dcp.FileSystemReader(tmp_path).read_metadata()
    for where, place in index.storage_data.items():
        part = (tmp_path / name).read_bytes()[place.offset : place.offset + place.length]
        assert same(torch.load(io.BytesIO(part), weights_only=True), given[where.fqn])


def test_the_same_bytes_as_torch_but_for_its_checksums(tmp_path: Path) -> None:
    """So that a change of PyTorch's format shows here first."""
    tensor, buffer = torch.randn(300, 7), io.BytesIO()
    torch.save(tensor, buffer)
    TensorFiles().write(tmp_path / "x", [(support.item("x"), tensor)], durable=False)
    ours, theirs = (tmp_path / "x").read_bytes(), buffer.getvalue()
    assert len(ours) == len(theirs)
    differ = sum(a != b for a, b in zip(ours, theirs, strict=True))
    assert 0 < differ <= 60  # the checksum stands in two places, and the archive's number is made of it


def test_what_is_written_is_of_the_save(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """Though everything was changed, and even freed, before it is written; and again from the memory that was kept."""
    writer = StateWriter(group, True, True)
    for turn in (1, 2):
        given = {"model.w": nn.Parameter(torch.randn(50, 3)), "optimizer.w.step": torch.tensor(float(turn))}
        given |= {"model.buffer": torch.randn(4), "optimizer.w.exp_avg": torch.randn(50, 3)}
        before = {key: value.detach().clone() for key, value in given.items()}
        pending = writer.begin(given)
        assert pending.staged
        with torch.no_grad():
            for value in given.values():
                value.zero_()
        pending.write(tmp_path / str(turn))
        found = {key: torch.zeros_like(value) for key, value in before.items()}
        dcp.load(found, checkpoint_id=tmp_path / str(turn))
        assert all(same(found[key], before[key]) for key in before)


def test_the_plan_is_made_once(tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plan = [], DefaultSavePlanner.create_local_plan
    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", lambda self: (made.append(1), plan(self))[1])
    writer = StateWriter(group, True, True)
    for number, (rows, count) in enumerate([(3, 1), (3, 1), (4, 2), (4, 2), (3, 3)]):
        given = {"w": torch.full((rows, 2), float(number)), "x": torch.tensor([number])}
        writer.begin(given).write(tmp_path / str(number))
        assert len(made) == count, "another shape is another plan"
        found = {"w": torch.zeros(rows, 2), "x": torch.tensor([-1])}
        dcp.load(found, checkpoint_id=tmp_path / str(number))
        assert found["w"].eq(number).all() and found["x"].eq(number).all()


def test_several_ranks_copy_aside_what_each_writes(tmp_path: Path) -> None:
    """What all of them have is copied and written by one; a rank without a part of its own writes no file."""
    sizes = run_ranks(support.divided, 3, tmp_path)
    assert sum(sizes) == 4 * (12 * 5 + 3 * 7), "no replica is copied twice"
    assert run_ranks(support.read_divided, 2, tmp_path) == [True, True]


def test_one_rank_s_failure_is_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(support.fails_on_one, 2, tmp_path) == ["a checkpoint could not be written (OSError: full)"] * 2


def test_with_too_little_memory_training_waits(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, and what is saved is as good."""
    monkeypatch.setattr(writing, "host_memory", lambda: (100, 1000))
    store = CheckpointStore(tmp_path, keep=3, background=True, group=group)
    for step in (1, 2):
        store.save(step, {"w": torch.full((20,), float(step))}, {}, "{}", lambda _: None, None)
        assert (tmp_path / f"step-{step:08d}/manifest.json").is_file(), "it is there when the call returns"
        told = store.notes()
        assert len(told) == (step == 1) and all("half of its free memory" in words for words in told)
    for step in (1, 2):
        check_whole(tmp_path / f"step-{step:08d}", group)
        found = {"w": torch.zeros(20)}
        load_tensors(tmp_path / f"step-{step:08d}", found, group)
        assert found["w"].eq(step).all()


def test_without_background_nothing_is_copied_aside(tmp_path: Path, group: dist.ProcessGroup) -> None:
    writer = StateWriter(group, True, background=False)
    assert not writer.begin({"w": torch.ones(3)}).staged and not writer._staging._buffers and not writer.notes()


@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["offloaded", "resident"])
def test_rows(device: torch.device | None, tmp_path: Path, group: dist.ProcessGroup) -> None:
    """What was offloaded is read when it is written, one tensor at a time; what lies in parts on the device is not."""
    alive: list[Any] = []
    most = 0

    def parts(value: float) -> Iterator[torch.Tensor]:
        nonlocal most
        for rows in (2, 3):
            made = torch.full((rows, 4), value)
            alive.append(weakref.ref(made))
            most = max(most, sum(one() is not None for one in alive))
            yield made

    given = {
        f"optimizer.{n}.exp_avg": LazyShardedTensor(
            torch.empty(()).expand(5, 4), lambda n=n: parts(n), lambda *_: None, device
        )  # type: ignore[misc]
        for n in range(6)
    }
    given["optimizer.step"] = LazyShardedTensor(torch.zeros(()), lambda: [torch.tensor(7.0)], lambda *_: None, device)
    pending = StateWriter(group, True, True).begin(given)
    assert pending.staged == (device is not None) == bool(alive)
    pending.write(tmp_path)
    assert most <= 3
    found: Any = {f"optimizer.{n}.exp_avg": torch.zeros(5, 4) for n in range(6)} | {"optimizer.step": torch.zeros(())}
    dcp.load(found, checkpoint_id=tmp_path)
    assert all(found[f"optimizer.{n}.exp_avg"].eq(n).all() for n in range(6)) and found["optimizer.step"] == 7


def test_states_of_another_s_optimizer(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """Lists of tensors, and what is no tensor."""
    given: dict[str, Any] = {"optimizer.w.blocks": [torch.ones(2), torch.zeros(3)], "optimizer.w.kind": "shampoo"}
    StateWriter(group, True, True).begin(given).write(tmp_path)
    found: dict[str, Any] = {"optimizer.w.blocks": [torch.zeros(2), torch.ones(3)], "optimizer.w.kind": ""}
    dcp.load(found, checkpoint_id=tmp_path)
    assert found["optimizer.w.kind"] == "shampoo" and found["optimizer.w.blocks"][0].eq(1).all()
