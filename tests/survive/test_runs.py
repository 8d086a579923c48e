"""Runs that lose a rank, stall or meet numbers gone wrong: real processes, and the model of an undisturbed run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support import cli, faults
from support.tiny import tiny_run, tokenizer_folder

from shardwise.checkpoint import host_copies
from shardwise.checkpoint.host_copies import newest_copy
from shardwise.launch.restarts import aside


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("survive")
    tokenizer_folder(tmp / "tokenizer")
    return tmp


def a_run(folder: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """RUN.yaml of 16 steps on two ranks that saves every 4, and its output folder."""
    values = {"train__steps": 16, "ranks": 2, "parallel__zero": 2, "checkpoint__every": 4, "timeout": "60s"} | changes
    run = tiny_run(folder, output=str(folder / name), **values)
    return cli.write_run(folder / f"{name}-run", run), folder / name


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    file, output = a_run(folder, "undisturbed")
    code, _, err = cli.train(file)
    assert code == 0, err
    return output


def same(one: Path, other: Path) -> bool:
    """Weights to the bit, and every step once with the same loss."""
    left, right = (load_file(f / "model/model.safetensors") for f in (one, other))
    return cli.losses(one) == cli.losses(other) and all(left[name].equal(right[name]) for name in left)


def test_a_killed_rank_is_started_again(folder: Path, undisturbed: Path) -> None:
    file, output = a_run(folder, "killed")
    process = cli.start(file)
    cli.wait_for_step(process, output, 6)
    cli.kill_rank(process, 1)
    code, _, err = cli.finish(process)
    assert code == 0, err
    assert "rank 1 failed at step" in err and "SIGKILL" in err and "(1 of 3)" in err and "→" not in err
    assert (output / "logs/start-1/rank-1.log").is_file()
    assert same(output, undisturbed)


def copied(process: subprocess.Popen[str], output: Path, beyond: int) -> int:
    """Waits for a copy in memory of a later step; its step."""
    while (step := newest_copy(output)) <= beyond:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return step


def left_in_memory(output: Path) -> bool:
    life = host_copies.read_life(output / "checkpoints")
    assert life is not None
    return (host_copies.root() / life.token).exists()


def test_a_killed_rank_goes_on_from_memory(folder: Path, undisturbed: Path) -> None:
    """No checkpoint is on disk yet when the rank dies."""
    file, output = a_run(folder, "copied", checkpoint={"every": 15, "memory": 2})
    process = cli.start(file)
    step = copied(process, output, 3)
    cli.kill_rank(process, 1)
    code, out, err = cli.finish(process)
    assert code == 0 and not (output / "checkpoints/damaged").exists(), err
    told = re.search(r"starting again from the copy of step (\d+) in memory \(1 of 3\)", err)
    assert told is not None and step <= int(told[1]) < 15, err
    assert re.search(rf"going on from the copy of step {told[1]} in memory \(\d+ steps? lost\)", out), out
    assert same(output, undisturbed) and not left_in_memory(output)


@pytest.mark.slow
def test_copies_outlive_the_command_but_not_the_run(folder: Path, undisturbed: Path) -> None:
    """The command is killed, and the same one goes on from memory; one that is stopped, or starts afresh, does not."""
    file, output = a_run(folder, "left", checkpoint={"every": 15, "memory": 2})
    process = cli.start(file)
    step = copied(process, output, 3)
    process.kill()
    process.communicate()
    assert left_in_memory(output)
    process = cli.start(file)
    cli.wait_for_step(process, output, step + 1)
    process.send_signal(signal.SIGINT)
    code, out, err = cli.finish(process)
    assert code == 130 and "going on from the copy of step" in out, err
    assert not left_in_memory(output), "it was saved to disk"
    process = cli.start(file, "resume=never")
    copied(process, output, 1)
    first = host_copies.read_life(output / "checkpoints")
    process.kill()
    process.communicate()
    code, out, err = cli.train(file, "resume=never")
    assert code == 0 and "going on" not in out, err
    assert first is not None and not (host_copies.root() / first.token).exists() and not left_in_memory(output)
    assert same(output, undisturbed)


def test_a_stalled_rank_is_named_and_left_behind(folder: Path, undisturbed: Path) -> None:
    """It sleeps within step 6: the others name it, its step and its line, and the run goes on without the nap."""
    file, output = a_run(folder, "stalled", timeout="6s")
    process = cli.start(file, env=faults.environment(folder / "sleeps", "sleep", 1, 6))
    cli.wait_for_step(process, output, 5)
    began = time.monotonic()
    while process.poll() is None and not (output / "logs/start-1").is_dir():
        time.sleep(0.1)
    taken = time.monotonic() - began
    code, _, err = cli.finish(process)
    assert code == 0 and taken < 180, err  # it would sleep for 3600
    assert "rank 1 kept the others waiting for 6 s (timeout) at step 6" in err
    assert "is computing, step 6" in err and "accumulate (" in err and "rank 0 waits in" in err
    assert "accumulate" in (output / "logs/start-1/stacks.txt").read_text()
    assert same(output, undisturbed)


def test_ranks_that_hang_in_native_code_are_named(folder: Path, undisturbed: Path) -> None:
    """None of their threads can speak, as in a driver call: the launcher does."""
    file, output = a_run(folder, "hung", timeout="6s")
    process = cli.start(file, env=faults.environment(folder / "hangs", "hang", "all", 6))
    cli.wait_for_step(process, output, 5)
    code, _, err = cli.finish(process)
    assert code == 0, err  # they would sleep for 3600 s
    assert "ranks 0, 1 have not responded for 6 s (timeout)" in err and "a deadlock between devices" in err
    assert "last seen at step 6 while computing, in accumulate (hangs/sitecustomize.py" in err
    assert "accumulate" in (output / "logs/start-1/stacks.txt").read_text()
    assert same(output, undisturbed)


def test_a_damaged_checkpoint_is_put_aside(folder: Path) -> None:
    """The newest checkpoint is flipped a bit before the rank dies: the one before is taken, and the rest put aside."""
    file, output = a_run(folder, "damaged", train__steps=5000)
    process = cli.start(file, "restarts=1")
    cli.wait_for_step(process, output, 9)
    while not (output / "checkpoints/step-00000008").is_dir():
        time.sleep(0.01)
    cli.rank_process(process, 0).send_signal(signal.SIGSTOP)  # no newer one meanwhile
    newest = sorted((output / "checkpoints").glob("step-*"))[-1]
    state = next((newest / "state").glob("__0_0*"))
    with state.open("r+b") as file_:
        file_.seek(state.stat().st_size // 2)
        byte = file_.read(1)
        file_.seek(-1, 1)
        file_.write(bytes([byte[0] ^ 1]))
    cli.kill_rank(process, 1)
    cli.wait_for_step(process, output, int(newest.name[5:]) + 6)
    assert (output / f"checkpoints/damaged-{newest.name}").is_dir()
    process.send_signal(signal.SIGTERM)
    code, _, err = cli.finish(process)
    assert code == 143 and f"{newest.name} is damaged and was put aside" in err, err
    steps = list(cli.losses(output))
    assert steps == list(range(1, len(steps) + 1))


def test_a_mistake_is_not_tried_again(folder: Path) -> None:
    file, _ = a_run(folder, "raises")
    code, _, err = cli.train(file, env=faults.environment(folder / "raising", "raise", 0, 2))
    assert code == 1 and "a fault of the test's own" in err and "starting again" not in err


@pytest.mark.parametrize("how", ["skip", "back"])
def test_gradients_that_are_no_numbers(folder: Path, how: str) -> None:
    file, output = a_run(folder, f"nan-{how}")
    code, _, err = cli.train(file, f"guard.nan={how}", env=faults.environment(folder / f"nans-{how}", "nan", "all", 7))
    assert code == 0, err
    (entry,) = [json.loads(line) for line in (output / "skipped.jsonl").read_text().splitlines()]
    assert entry["did"] == how and entry["step"] == 7 and "nan" in entry["why"]
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    trained = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in trained] == list(range(1, 17)) and trained[-1]["loss"] < trained[0]["loss"]
    assert [r["step"] for r in trained if r.get("skipped")] == ([7] if how == "skip" else [])
    seen = json.loads((output / "checkpoints/step-00000016/trainer.json").read_text())["sequences"]
    left_out = 0 if how == "skip" else 3 * 12  # the steps after the checkpoint, up to the seventh
    assert seen == 16 * 12 + left_out
    assert ("starting again from step-00000004" in err) == (how == "back")


@pytest.mark.parametrize("how", ["stop", "skip", "back"])
def test_a_leap_of_the_loss(folder: Path, how: str) -> None:
    file, output = a_run(folder, f"leap-{how}", guard={"spike": 6.0, "on_spike": how, "window": 5, "max_recoveries": 1})
    code, _, err = cli.train(file, env=faults.environment(folder / f"leaps-{how}", "leap", "all", 9))
    assert code == (1 if how == "stop" else 0), err
    if how == "stop":
        assert "the loss leapt to" in err and "guard.on_spike: back" in err
    else:
        (entry,) = [json.loads(line) for line in (output / "skipped.jsonl").read_text().splitlines()]
        assert entry["did"] == how and entry["step"] == 9 and "leapt" in entry["why"]


def test_too_often(folder: Path) -> None:
    file, _ = a_run(folder, "often")
    settings = ("guard.nan=skip", "advanced.guard.max_recoveries=0")
    code, _, err = cli.train(file, *settings, env=faults.environment(folder / "too-often", "nan", "all", 3))
    assert code == 1 and "(advanced.guard.max_recoveries)" in err and "starting again" not in err


def test_a_flipped_bit_is_found_and_named(folder: Path) -> None:
    file, _ = a_run(folder, "flipped", ranks=3, parallel__zero=0, guard={"checksum": 4})
    code, _, err = cli.train(file, env=faults.environment(folder / "flips", "flip", 1, 6))
    assert code == 1 and "rank 1's copy of model." in err and "differs from that of 2 others at step 8" in err, err
    assert "they were alike at step 4" in err


def test_replicas_stay_alike(folder: Path, undisturbed: Path) -> None:
    """Where nothing fails the comparison says nothing and changes nothing."""
    file, output = a_run(folder, "alike", guard={"checksum": 2}, parallel={"zero": 2, "dp_shard_size": 1})
    code, _, err = cli.train(file)
    assert code == 0, err
    assert cli.losses(output).keys() == cli.losses(undisturbed).keys()


def test_a_checkpoint_is_put_aside_again(tmp_path: Path) -> None:
    """A step that was saved again after its first checkpoint was damaged, and damaged again."""
    for content in ("first", "second"):
        (tmp_path / "step-00000004").mkdir()
        (tmp_path / "step-00000004/manifest.json").write_text(content)
        assert aside(tmp_path) == ["step-00000004"]
    assert (tmp_path / "damaged-step-00000004/manifest.json").read_text() == "second"
