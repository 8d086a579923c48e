"""Damage of any kind is found before anything is loaded, and named; a new command goes on from the one before."""

from __future__ import annotations

import json
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
from shardwise.core.errors import UserError
from shardwise.observe.metrics import read_metrics


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


@pytest.fixture
def command(run_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """RUN.yaml that goes on with a copy of the run to step 6 on two ranks, and its checkpoints."""
    run = tiny_run(
        run_folder, train__steps=6, checkpoint__every=2, parallel__zero=3, ranks=2, output=str(tmp_path / "out")
    )
    shutil.copytree(run_folder / "out", tmp_path / "out")
    return cli.write_run(tmp_path, run), tmp_path / "out/checkpoints"


def flip(file: Path) -> Path:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    return file


def test_a_new_command_goes_on_from_the_one_before(command: tuple[Path, Path]) -> None:
    """Through the real command: the damaged one is put aside, named on the terminal and in metrics.jsonl."""
    file, checkpoints = command
    bad = flip(checkpoints / "step-00000004/state/__1_0.distcp")
    code, out, err = cli.train(file)
    assert code == 0 and "Traceback" not in out + err, err
    assert f"WARNING: the checkpoint step-00000004 is damaged: {bad} is damaged: its hash does not match" in out, out
    said = "put aside as damaged-step-00000004; going on from step-00000002: 2 steps are lost and done again"
    assert said in out and "(step 2)" in out, out
    output = checkpoints.parent
    assert list(cli.losses(output)) == [1, 2, 3, 4, 5, 6]
    (record,) = [r for r in read_metrics(output / "metrics.jsonl") if r["kind"] == "damaged"]
    assert record["checkpoint"] == "step-00000004" and record["from"] == "step-00000002"
    assert record["step"] == 2 and record["lost_steps"] == 2 and str(bad) in record["files"][0]
    assert verify(checkpoints / "damaged-step-00000004") and not verify(checkpoints / "step-00000004")


def test_a_flipped_bit_does_not_make_it_another_runs(command: tuple[Path, Path]) -> None:
    """What is looked at before the ranks start may itself be damaged: then its answer is worth nothing."""
    file, checkpoints = command
    trainer = checkpoints / "step-00000004/trainer.json"
    values = json.loads(trainer.read_text())
    trainer.write_text(json.dumps(values | {"data_fingerprint": "0" + values["data_fingerprint"][1:] + "0"}))
    code, out, err = cli.train(file)
    assert code == 0 and "step-00000004 is damaged" in out, out + err


def test_one_that_is_named_is_meant(command: tuple[Path, Path]) -> None:
    """Exit code, message, nothing trained, nothing renamed; and the one that the message offers goes on."""
    file, checkpoints = command
    bad = flip(checkpoints / "step-00000004/state/__1_0.distcp")
    code, _, err = cli.train(file, f"resume={checkpoints}/step-00000004")
    assert code == 2 and str(bad) in err and "Traceback" not in err
    good = checkpoints / "step-00000002"
    assert f"resume={good}" in err
    assert cli.steps_done(checkpoints.parent) == 4 and bad.is_file()
    code, _, err = cli.train(file, f"resume={good}")
    assert code == 0, err
    assert sorted(cli.losses(checkpoints.parent)) == [1, 2, 3, 4, 5, 6]


def test_where_none_is_whole_it_ends(command: tuple[Path, Path]) -> None:
    """And leaves them where they are: a file may be mended from elsewhere."""
    file, checkpoints = command
    first = flip(checkpoints / "step-00000002/state/__0_0.distcp")
    bad = flip(checkpoints / "step-00000004/manifest.json")
    code, _, err = cli.train(file)
    assert code == 2 and str(bad) in err and "resume=never" in err and "more file" not in err, err
    assert first.is_file() and bad.is_file() and cli.steps_done(checkpoints.parent) == 4
