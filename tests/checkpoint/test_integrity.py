"""Damage of any kind is found before anything is loaded, named, and answered with the previous good checkpoint."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

from shardwise.checkpoint.folders import list_checkpoints
from shardwise.checkpoint.integrity import verify
from shardwise.checkpoint.store import check_whole
from shardwise.errors import UserError


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on two ranks with checkpoints at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("integrity")
    tokenizer_folder(folder / "tokenizer")
    run_ranks(scenarios.train, 2, tiny_run(folder, train__steps=4, checkpoint__every=2, parallel__zero=3))
    assert [p.name for p in list_checkpoints(folder / "out/checkpoints")] == ["step-00000002", "step-00000004"]
    return folder


@pytest.fixture
def checkpoints(run_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(run_folder / "out/checkpoints", tmp_path / "checkpoints"))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_whole(folder)
    return str(caught.value)


def test_whole_checkpoints_pass(checkpoints: Path) -> None:
    for folder in list_checkpoints(checkpoints):
        check_whole(folder)
        names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        assert {
            "manifest.json",
            "trainer.json",
            "run.json",
            "state/.metadata",
            "state/__0_0.distcp",
            "state/__1_0.distcp",
            "model/config.json",
            "model/tokenizer.json",
        } <= names


def test_one_flipped_byte_in_each_file(checkpoints: Path) -> None:
    last, good = list_checkpoints(checkpoints)[-1], list_checkpoints(checkpoints)[0]
    draw = random.Random(0)
    files = sorted(p for p in last.rglob("*") if p.is_file())
    assert len(files) >= 8
    for file in files:
        whole = file.read_bytes()
        for position in {0, len(whole) - 1, draw.randrange(len(whole))}:
            damaged = bytearray(whole)
            damaged[position] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            message = refusal(last)
            assert str(file) in message and str(good) in message, message
        file.write_bytes(whole)
    check_whole(last)


def test_fifty_truncations(checkpoints: Path) -> None:
    last, good = list_checkpoints(checkpoints)[-1], list_checkpoints(checkpoints)[0]
    draw = random.Random(1)
    files = sorted(p for p in last.rglob("*") if p.is_file())
    for _ in range(50):
        file = draw.choice(files)
        whole = file.read_bytes()
        file.write_bytes(whole[: draw.randrange(len(whole))])
        message = refusal(last)
        assert str(file) in message and str(good) in message, message
        file.write_bytes(whole)


def test_a_missing_file_is_named(checkpoints: Path) -> None:
    last = list_checkpoints(checkpoints)[-1]
    (last / "state/__1_0.distcp").unlink()
    assert "state/__1_0.distcp is missing" in refusal(last)
    (last / "manifest.json").unlink()
    assert "never completed" in refusal(last)


def test_when_all_are_damaged_none_is_offered(checkpoints: Path) -> None:
    for folder in list_checkpoints(checkpoints):
        (folder / "trainer.json").write_text("{}")
    assert "resume=never" in refusal(list_checkpoints(checkpoints)[-1])


def test_ranks_share_the_work(checkpoints: Path) -> None:
    last = list_checkpoints(checkpoints)[-1]
    (last / "trainer.json").write_text("{}")
    found = [verify(last, share, 3) for share in range(3)]
    assert sum(map(len, found)) == 1


def test_the_command_refuses_and_the_offer_works(run_folder: Path, tmp_path: Path) -> None:
    """Through the real command, on two ranks: exit code, message, nothing trained; the offered one goes on."""
    run = tiny_run(
        run_folder, train__steps=6, checkpoint__every=2, parallel__zero=3, ranks=2, output=str(tmp_path / "out")
    )
    shutil.copytree(run_folder / "out", tmp_path / "out")
    file = cli.write_run(tmp_path, run)
    damaged = tmp_path / "out/checkpoints/step-00000004/state/__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 4
    damaged.write_bytes(data)
    code, _, err = cli.train(file)
    assert code == 2 and str(damaged) in err and "Traceback" not in err
    good = tmp_path / "out/checkpoints/step-00000002"
    assert f"resume={good}" in err
    assert cli.steps_done(tmp_path / "out") == 4, "nothing was trained"
    code, _, err = cli.train(file, f"resume={good}")
    assert code == 0, err
    assert sorted(cli.losses(tmp_path / "out")) == [1, 2, 3, 4, 5, 6]
