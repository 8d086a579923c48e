"""Copies in memory: which hosts hold what, what is gone on from when some are lost, and what is left behind."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from support import copies
from support.ranks import run_ranks

from shardwise.checkpoint import host_copies
from shardwise.checkpoint.exchange import FileTransfer, fetches, ring
from shardwise.checkpoint.host_copies import Life, list_copies, read_life
from shardwise.core.errors import UserError


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_hosts_that_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hosts, one of them with two ranks: what one holds is on the next one too, two copies are kept."""
    notes = run_ranks(copies.make, 4, tmp_path, ["a", "a", "b", "c"], [3, 5, 7])
    assert notes[0] and "with those of c" in notes[0][0]
    monkeypatch.setenv("SHARDWISE_MEMORY", str(tmp_path / "memory"))
    life = read_life(tmp_path / "checkpoints")
    assert life is not None and life.began == (0,)
    top = host_copies.root() / life.token
    assert stat.S_IMODE(host_copies.root().stat().st_mode) == 0o700
    held = {host: list_copies(top / host, life) for host in "abc"}
    assert {host: [one.step for one in found] for host, found in held.items()} == {host: [5, 7] for host in "abc"}
    parts = {h: {n for n in found[-1].files if "distcp" in n} for h, found in held.items()}
    own = {"a": (0, 1), "b": (2,), "c": (3,)}
    for host, before in (("a", "c"), ("b", "a"), ("c", "b")):
        assert parts[host] == {f"state/__{rank}_0.distcp" for rank in own[host] + own[before]}
        assert not held[host][-1].whole

    # b is gone and c's own part is damaged: both are still on their neighbours. Fewer ranks read them.
    shutil.rmtree(top / "b")
    flip(top / "c/step-00000007.1/state/__3_0.distcp")
    assert run_ranks(copies.go_on, 2, tmp_path, ["a", "c"]) == [(7, 7, " (1 step lost)")] * 2
    # The neighbour's is damaged too: the copy before is whole. Then all that held b's part is gone, and no copy is; and
    # at last a host has no room for another's.
    for file in top.glob("*/step-00000007.1/state/__3_0.distcp"):
        flip(file)
    lost = [top / host / "step-00000005.1/state/__2_0.distcp" for host in "acd"]
    ended = run_ranks(copies.lose_and_run_short, 3, tmp_path, ["a", "c", "d"], lost)
    for gone_on, busy, told, left in ended:
        assert gone_on == (5, 5, " (2 steps lost)") and busy and left == []
        assert told == ["no more copies in memory: rank 1 cannot keep another host's part (No space left on device)"]
    assert not any((tmp_path / "memory").rglob("step-*")), "what was there is removed at the end"


def test_the_ring() -> None:
    assert ring(["a", "a"]) == {}
    assert ring(["a", "a", "b"]) == {0: 2, 1: 2, 2: 0}
    assert ring(["a", "b", "a", "c", "c"]) == {0: 1, 2: 1, 1: 3, 3: 0, 4: 2}


def test_files_are_fetched_once_by_a_host_that_lacks_them() -> None:
    hosts, holders = ["a", "b", "b"], {"x": ["a"], "y": ["a", "b"]}
    found = fetches([{"x"}, {"x", "y"}, {"x"}], hosts, holders, {"x": 5, "y": 6})
    assert found == [FileTransfer(0, 1, "x", 5)]


def test_starts_that_went_back() -> None:
    """The second start went on from 9, the third from 12: what was done beyond these by others is no more."""
    life = Life("0" * 16, (0, 9, 12))
    assert life.counts(9, 1) and not life.counts(10, 1)
    assert life.counts(12, 2) and not life.counts(13, 2)
    assert life.counts(99, 3) and not life.counts(1, 4) and not life.counts(1, 0)


def test_what_dead_runs_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_MEMORY", str(tmp_path))
    host_copies.make_private(host_copies.root())
    for token in ("dead", "held", "young", "mine"):
        folder = host_copies.root() / token / "host"
        folder.mkdir(parents=True)
        handle = host_copies.hold(folder)
        if token != "held":
            os.close(handle)
        if token != "young":
            for path in (folder, folder / "held"):
                os.utime(path, (1, 1))
    assert [path.parent.name for path in host_copies.sweep(kept_tokens=["mine"])] == ["dead"]
    assert sorted(path.name for path in host_copies.root().iterdir()) == ["held", "mine", "young"]


def test_a_folder_that_others_could_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_MEMORY", str(tmp_path))
    host_copies.root().mkdir(mode=0o755)
    with pytest.raises(UserError, match="yours alone"):
        host_copies.make_private(host_copies.root())


def test_a_token_is_no_path(tmp_path: Path) -> None:
    (tmp_path / host_copies.FILE).write_text('{"token": "../../etc", "began": []}')
    assert read_life(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]], ids=["one host", "two hosts"])
def test_what_a_copy_costs(tmp_path: Path, hosts: list[str]) -> None:
    """In CPU time, which other work does not change much: the training thread pays for the copying alone."""
    for training, whole, size in run_ranks(copies.cost, 2, tmp_path, hosts):
        print(f"{hosts}: {1e12 * training / size:.0f} ms per GB in training, {1e12 * whole / size:.0f} in all")
        assert training < 0.3 * whole  # a tenth and less
