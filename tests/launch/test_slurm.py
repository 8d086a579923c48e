"""Slurm: the script, and a real controller with two node daemons that run it, cancel it, and run out of its time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import cli
from support.slurm_cluster import slurm
from support.tiny import tiny_run, tokenizer_folder

from shardwise.core.errors import UserError
from shardwise.launch.hosts import Hosts
from shardwise.launch.slurm import Slurm
from shardwise.launch.submission import Submission


def asked(**changes: Any) -> Submission:
    values: dict[str, Any] = {
        "run_file": Path("/my runs/run.yaml"), "overrides": ("train.steps=5", "model='x y'"), "hosts": Hosts(2, 2),
        "name": "job", "output": Path("/out"), "folder": Path("/my runs"),
    }  # fmt: skip
    return Submission(**values | changes)


def test_the_script() -> None:
    text = Slurm().text(asked(
        hosts=Hosts(2, 4), gpus=8, gpu="h100", cpus=64, minutes=90, partition="train", account="us",
        env={"A": "it's; rm -rf $HOME"}, passed=("HF_TOKEN",), lines=("module load cuda", "#SBATCH --qos=high"),
    ))  # fmt: skip
    head, _, body = text.partition("\n\n")
    for line in ("nodes=2-4", "gpus-per-node=h100:8", "cpus-per-task=64", "time=90", "partition=train", "account=us",
                 "requeue", "no-kill", "signal=B:TERM@330", "qos=high", "output=/out/slurm-%j.log"):  # fmt: skip
        assert f"#SBATCH --{line}" in head.splitlines(), line
    assert "srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task=64" in body
    assert "cd '/my runs' || exit 1" in body and "module load cuda" in body
    assert "export A='it'\"'\"'s; rm -rf $HOME'" in body, "quoted"
    assert "'model='\"'\"'x y'\"'\"''" in body and "--ranks 8" in body and "--hosts 2:4" in body
    drawn = "\n".join(line for line in body.splitlines() if "SHARDWISE_MEETING_TOKEN" in line)
    printed = subprocess.run(
        ["bash", "-c", f"{drawn}\necho $SHARDWISE_MEETING_TOKEN"], capture_output=True, text=True, check=True
    ).stdout
    assert len(printed.strip()) == 64 and int(printed, 16), "each job draws its own"
    assert "HF_TOKEN" not in text, "its value goes with the environment, not with the script"
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_what_a_script_cannot_hold_is_refused() -> None:
    with pytest.raises(UserError, match="more than one line"):
        Slurm().text(asked(lines=("a\n#SBATCH --uid=0",)))
    with pytest.raises(UserError, match="no blanks"):
        Slurm().text(asked(partition="a\n#SBATCH --uid=0"))


def test_fixed_numbers_of_hosts_end_with_a_node() -> None:
    assert "--no-kill" not in Slurm().text(asked()) and "#SBATCH --nodes=2\n" in Slurm().text(asked())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as env:
        yield env


def shardwise(folder: Path, env: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", "launch", *words], cwd=folder, env=os.environ | env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def a_run(folder: Path, **changes: Any) -> Path:
    tokenizer_folder(folder / "tokenizer")
    return cli.write_run(folder / "run", tiny_run(folder, parallel__zero=2, **changes))


def launched(folder: Path, env: dict[str, str], file: Path, *more: str) -> str:
    words = [str(file), "--slurm", "--hosts", "2", "--ranks", "1", "--grace", "20", "--no-follow", *more]
    process = shardwise(folder, env, *words)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    return said.partition("launched ")[2].split()[0]


def log_of(folder: Path, identity: str) -> str:
    file = folder / f"out/slurm-{identity.partition(':')[2]}.log"
    return file.read_text() if file.exists() else ""


def wait_for(condition: Any, within: float, told: Any) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_two_nodes_is_followed_to_its_end(tmp_path: Path, cluster: dict[str, str]) -> None:
    file = a_run(tmp_path, train__steps=10)
    process = shardwise(tmp_path, cluster, str(file), "--slurm", "--hosts", "2", "--ranks", "1", "--name", "tiny")
    said = process.communicate(timeout=180)[0]
    assert process.returncode == 0, said
    assert "launched slurm:" in said and "1 of 2 ranks on 2 hosts" in said and "done: 10 steps" in said
    assert "[n1]" in said and "[n2]" in said and "has ended: completed" in said
    assert (tmp_path / "out/model/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cancelled_run_saves_and_is_not_queued_again(tmp_path: Path, cluster: dict[str, str]) -> None:
    identity = launched(tmp_path, cluster, a_run(tmp_path, train__steps=100_000))
    wait_for(lambda: cli.steps_done(tmp_path / "out") >= 3, 120, lambda: log_of(tmp_path, identity))
    assert "running" in shardwise(tmp_path, cluster, "--status", identity).communicate(timeout=30)[0]
    assert "is ending" in shardwise(tmp_path, cluster, "--cancel", identity).communicate(timeout=30)[0]
    checkpoints = tmp_path / "out/checkpoints"
    wait_for(lambda: list(checkpoints.glob("step-*")), 60, lambda: log_of(tmp_path, identity))

    def state() -> str:
        return shardwise(tmp_path, cluster, "--status", identity).communicate(timeout=30)[0]

    wait_for(lambda: "cancelled" in state(), 90, lambda: state() + log_of(tmp_path, identity))
    assert "queued again" not in log_of(tmp_path, identity)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_out_of_time_it_saves_and_goes_on_when_queued_again(tmp_path: Path, cluster: dict[str, str]) -> None:
    identity = launched(tmp_path, cluster, a_run(tmp_path, train__steps=100_000), "--time", "2min")
    try:
        wait_for(lambda: "queued again" in log_of(tmp_path, identity), 200, lambda: log_of(tmp_path, identity))
        assert "stopping: the ranks of all hosts save" in log_of(tmp_path, identity)
        assert list((tmp_path / "out/checkpoints").glob("step-*"))
        wait_for(lambda: "going on from" in log_of(tmp_path, identity), 200, lambda: log_of(tmp_path, identity))
    finally:
        shardwise(tmp_path, cluster, "--cancel", identity).communicate(timeout=30)
