"""Ray: a real cluster of two nodes on this machine; a run through its jobs, one node lost, and a stop that saves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import cli
from support.tiny import tiny_run, tokenizer_folder

from shardwise.core.errors import RunFailed
from shardwise.launch import ray_jobs
from shardwise.launch.rendezvous_link import free_port


class Dashboard:
    """Refuses as Ray's does."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def get_job_status(self, identity: str) -> Any:
        raise self.error


@pytest.mark.parametrize("error, more", [
    (RuntimeError("Job x does not exist\nat all"), ""),
    (ConnectionError("refused"), ""),
    (RuntimeError("Request failed with status code 500: No available agent to submit job"), "dashboard_agent.log"),
])  # fmt: skip
def test_what_ray_refuses_is_told_in_words(monkeypatch: pytest.MonkeyPatch, error: Exception, more: str) -> None:
    monkeypatch.setattr(ray_jobs, "_connect", lambda _: Dashboard(error))
    with pytest.raises(RunFailed) as refused:
        ray_jobs.RayJobs("http://head:1").status("x")
    first, _, rest = str(refused.value).partition("\n")
    assert first == f"Ray at http://head:1 did not do it: {str(error).splitlines()[0]}" and more in rest


def head_with(**settings: Any) -> dict[str, Any]:
    """A head node with ports of its own: Ray's usual port of the agent for jobs goes to one cluster of a machine."""
    return {
        "include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_agent_listen_port": free_port(),
    } | settings  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    port = free_port()
    made = Cluster(initialize_head=True, head_node_args=head_with(num_cpus=1, dashboard_port=port))
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
    """The head, where the agents met, goes on alone."""
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_another_node_takes_over_the_meeting(tmp_path: Path) -> None:
    """The head has no room for agents, and the node that they met at is lost."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    port = free_port()
    made = Cluster(initialize_head=True, head_node_args=head_with(num_cpus=0, dashboard_port=port))
    made.dashboard = f"http://127.0.0.1:{port}"
    lines: list[str] = []
    try:
        workers = [made.add_node(num_cpus=1) for _ in range(2)]
        made.wait_for_nodes()
        file = a_run(tmp_path, train__steps=80, checkpoint={"every": 5})
        process = shardwise(tmp_path, made, file, "--ray", "--hosts", "1:2", "--ranks", "1", "--grace", "20")
        assert process.stdout is not None
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        deadline = time.monotonic() + 240
        while cli.steps_done(tmp_path / "out") < 12:
            assert process.poll() is None and time.monotonic() < deadline, "".join(lines)
            time.sleep(0.2)
        first = next(line for line in lines if "hosts meet here" in line).partition("[node-0-")[2][:6]
        made.remove_node(next(one for one in workers if one.node_id.startswith(first)), allow_graceful=False)
        assert process.wait(240) == 0, "".join(lines)
        reader.join(5)
    finally:
        print("".join(lines))
        made.shutdown()
    said = "".join(lines)
    assert said.count("hosts meet here") == 2 and "done: 80 steps" in said
    assert list(cli.losses(tmp_path / "out")) == list(range(1, 81))
