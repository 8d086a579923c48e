"""SSH: a real sshd on each of two hosts (network namespaces), with keys that are thrown away."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import cli
from support.hosts import Host, some_hosts
from support.tiny import tiny_run, tokenizer_folder

CONFIG = """\
ListenAddress {address}
Port 2222
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/sshd-{name}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
AcceptEnv PYTHONPATH SHARDWISE_* OMP_NUM_THREADS
"""


class Cluster:
    """Hosts with an sshd each; commands are given on the first of them."""

    def __init__(self, folder: Path, hosts: list[Host]) -> None:
        self.hosts, self.names = hosts, ",".join(host.address for host in hosts)
        kept = "PYTHONPATH SHARDWISE_CACHE SHARDWISE_PROGRESS OMP_NUM_THREADS"
        options = ["-p", "2222", "-i", f"{folder}/user_key", "-o", "StrictHostKeyChecking=no", "-o",
                   f"UserKnownHostsFile={folder}/known", "-o", f"'SendEnv={kept}'", "-o", "LogLevel=ERROR"]  # fmt: skip
        self.env = os.environ | {"SHARDWISE_SSH_OPTIONS": " ".join(options), "OMP_NUM_THREADS": "1"}

    def launch(self, file: Path, *more: str, names: str = "") -> subprocess.Popen[str]:
        words = ["launch", str(file), "--ssh", names or self.names, "--ranks", "1", *more]
        return subprocess.Popen(
            [*self.hosts[0].inside, sys.executable, "-m", "shardwise", *words], env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=file.parent,
        )  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    program = shutil.which("sshd") or "/usr/sbin/sshd"
    if not Path(program).is_file() or not shutil.which("ssh"):
        pytest.skip("needs ssh and sshd")
    folder = tmp_path / "ssh"
    folder.mkdir()
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    with some_hosts(2) as hosts:
        try:
            for host in hosts:
                config = folder / f"{host.name}.conf"
                config.write_text(CONFIG.format(address=host.address, folder=folder, name=host.name))
                subprocess.run([*host.inside, program, "-f", str(config), "-E", str(folder / "log")], check=True)
            yield Cluster(folder, hosts)
        finally:
            for file in folder.glob("sshd-*.pid"):
                _end(int(file.read_text()))


def _end(pid: int) -> None:
    try:
        daemon = psutil.Process(pid)
        for process in [*daemon.children(recursive=True), daemon]:
            process.terminate()
    except psutil.Error:
        pass


def a_run(folder: Path, **changes: Any) -> Path:
    tokenizer_folder(folder / "tokenizer")
    return cli.write_run(folder / "run", tiny_run(folder, parallel__zero=2, **changes))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_on_two_hosts(tmp_path: Path, cluster: Cluster) -> None:
    os.environ["SHARDWISE_A_SECRET"] = cluster.env["SHARDWISE_A_SECRET"] = 'it\'s; "quoted" $HOME'
    process = cluster.launch(a_run(tmp_path, train__steps=10), "--env", "SHARDWISE_A_SECRET", "--env", "B=it's")
    try:
        agents = []
        while not agents and process.poll() is None:
            time.sleep(0.1)
            agents = [p for p in psutil.process_iter(["cmdline"]) if "--listen" in (p.info["cmdline"] or [])]
        assert all("quoted" not in " ".join(p.info["cmdline"]) for p in psutil.process_iter(["cmdline"]))
        environ = agents[0].environ()
        assert environ["SHARDWISE_A_SECRET"] == 'it\'s; "quoted" $HOME' and environ["B"] == "it's"
        said = process.communicate(timeout=180)[0]
    finally:
        process.kill()
        del os.environ["SHARDWISE_A_SECRET"]
    assert process.returncode == 0, said
    first, second = (host.address for host in cluster.hosts)
    assert f"{first} | " in said and f"{second} | " in said and "1 of 2 ranks on 2 hosts" in said
    assert f"{first} | done: 10 steps" in said and (tmp_path / "out/model/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stopping_it_saves_on_all_hosts(tmp_path: Path, cluster: Cluster) -> None:
    process = cluster.launch(a_run(tmp_path, train__steps=100_000))
    try:
        cli.wait_for_step(process, tmp_path / "out", 3, 120)
        launcher = next(p for p in [psutil.Process(process.pid), *psutil.Process(process.pid).children()])
        launcher.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode in (130, 143), said
    assert "stopping: the ranks of all hosts save" in said and list((tmp_path / "out/checkpoints").glob("step-*"))
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
            and "--listen" in p.info["cmdline"]]  # fmt: skip
    assert not left


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_host_that_is_not_there_is_told_soon(tmp_path: Path, cluster: Cluster) -> None:
    began = time.monotonic()
    names = f"{cluster.hosts[0].address},10.214.78.99"
    process = cluster.launch(a_run(tmp_path, train__steps=10), names=names)
    said = process.communicate(timeout=120)[0]
    assert process.returncode not in (0, None) and "10.214.78.99 cannot be reached" in said, said
    assert time.monotonic() - began < 120
