"""Ray: a real cluster of two nodes on this machine; a run through its jobs, one node lost, and a stop that saves."""

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
from support.tiny import tiny_run, tokenizer_folder

from shardwise.launch.link import free_port


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    port = free_port()
    made = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 1, "include_dashboard": True, "dashboard_port": port, "dashboard_host": "127.0.0.1",
    })  # fmt: skip
    try:
        made.dashboard = f"http://127.0.0.1:{port}"
        made.second = made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()


def shardwise(folder: Path, cluster: Any, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", "launch", *words, "--address", cluster.dashboard], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def a_run(folder: Path, **changes: Any) -> str:
    tokenizer_folder(folder / "tokenizer")
    return str(cli.write_run(folder / "run", tiny_run(folder, parallel__zero=2, **changes)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_two_nodes(tmp_path: Path, cluster: Any) -> None:
    process = shardwise(tmp_path, cluster, a_run(tmp_path, train__steps=10), "--ray", "--hosts", "2", "--ranks", "1")
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    assert "launched ray:shardwise-out-" in said and "1 of 2 ranks on 2 hosts" in said and "done: 10 steps" in said
    assert "[node-0-" in said and "[node-1-" in said and (tmp_path / "out/model/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopping_the_job_saves(tmp_path: Path, cluster: Any) -> None:
    file = a_run(tmp_path, train__steps=100_000)
    process = shardwise(tmp_path, cluster, file, "--ray", "--hosts", "2", "--ranks", "1", "--no-follow")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    identity = said.partition("launched ")[2].split()[0]

    def status() -> str:
        return shardwise(tmp_path, cluster, "--status", identity).communicate(timeout=60)[0].strip()

    deadline = time.monotonic() + 180
    while cli.steps_done(tmp_path / "out") < 3:
        assert time.monotonic() < deadline, status()
        time.sleep(0.5)
    assert status() == "running"
    shardwise(tmp_path, cluster, "--cancel", identity).communicate(timeout=60)
    while status() not in ("stopped", "failed") and time.monotonic() < deadline:
        time.sleep(1)
    assert status() == "stopped" and list((tmp_path / "out/checkpoints").glob("step-*"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_node_is_done_without(tmp_path: Path, cluster: Any) -> None:
    """Whichever of the two the agents met at: the other goes on, alone."""
    file = a_run(tmp_path, train__steps=120, checkpoint={"every": 5})
    words = [file, "--ray", "--hosts", "1:2", "--ranks", "1", "--grace", "20"]
    process = shardwise(tmp_path, cluster, *words)
    try:
        cli.wait_for_step(process, tmp_path / "out", 12, 240)
        cluster.remove_node(cluster.second, allow_graceful=False)
        said = process.communicate(timeout=300)[0]
        print(said)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "1 of 2 ranks on 2 hosts" in said and "1 of 1 ranks on 1 hosts" in said and "done: 120 steps" in said
    assert list(cli.losses(tmp_path / "out")) == list(range(1, 121))
