"""Under torchrun the ranks are the command itself: same losses as our own launcher, on one host and across two."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import cli
from support.tiny import tiny_run, tokenizer_folder

from shardwise.cli import main as command_line
from shardwise.core.cpu_probe import usable_cores

# Half precision, because under torchrun nobody but the rank itself can give oneDNN the cap that some CPUs need.
STEPS, PRECISION = 4, "bf16"
BRIDGE = ("10.213.77.1", "10.213.77.2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("torchrun")
    tokenizer_folder(tmp / "tokenizer")
    return tmp


def a_run(folder: Path, name: str, **changes: Any) -> Path:
    run = tiny_run(
        folder, train__steps=STEPS, parallel__zero=3, precision=PRECISION, output=str(folder / name), **changes
    )
    return cli.write_run(folder / f"{name}-run", run)


@pytest.fixture(scope="module")
def local_losses(folder: Path) -> dict[int, float]:
    """`shardwise train` with two ranks."""
    code, _, err = cli.train(a_run(folder, "local"), "ranks=2")
    assert code == 0, err
    return cli.losses(folder / "local")


def torchrun(file: Path, *options: str, inside: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
    """`torchrun … -m shardwise train` in the background; `inside` is what comes before the command."""
    command = [*inside, sys.executable, "-m", "torch.distributed.run", *options, "-m", "shardwise", "train", str(file)]
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // 2))}  # as our launcher: sums round alike
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | threads | env
    )


def test_same_losses_as_our_launcher(folder: Path, local_losses: dict[int, float]) -> None:
    process = torchrun(a_run(folder, "torchrun"), "--nproc-per-node", "2", GLOO_SOCKET_IFNAME="lo")
    code, out, err = cli.finish(process)
    assert code == 0, err
    assert cli.losses(folder / "torchrun") == local_losses, "bit for bit"
    assert out.count("done: 4 steps") == 1 and out.count("plan of the run") == 1, "the main rank speaks, nobody else"
    assert (folder / "torchrun/model/model.safetensors").is_file()


def test_a_mistake_is_told_once(folder: Path) -> None:
    file = a_run(folder, "mistake", train__batchsize=4)
    code, out, err = cli.finish(torchrun(file, "--nproc-per-node", "2"))
    assert code != 0 and not (folder / "mistake").exists()
    assert (out + err).count("train.batchsize") == 1 and "did you mean train.batch_size?" in err, err


def test_a_failure_of_one_rank_alone_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends a rank whose neighbour has spoken and left; one that is still there speaks for itself."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(command_line, "FIRST_WORD", 0.1)
    with pytest.raises(SystemExit) as left:
        command_line.main(["train", str(tmp_path / "nothing.yaml")])
    assert left.value.code == 2 and "nothing.yaml" in capsys.readouterr().err


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces joined by a cable: hosts in all that sockets can tell, on one file system."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    names = [f"shardwise-{os.getpid()}-{i}" for i in (0, 1)]
    cables = [f"sw{os.getpid() % 10**8}v{i}" for i in (0, 1)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip(
                "link",
                "add",
                cables[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                cables[1],
                "netns",
                names[1],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not to be had here: {error.stderr.strip()}")
        for name, cable, address in zip(names, cables, BRIDGE, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [f"{name} {cable}" for name, cable in zip(names, cables, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_two_hosts(folder: Path, local_losses: dict[int, float], two_hosts: list[str]) -> None:
    """One rank on each, one network between them; nothing of the run knows that the hosts are not real."""
    file = a_run(folder, "hosts")
    processes = []
    for node, host in enumerate(two_hosts):
        name, cable = host.split()
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{BRIDGE[0]}:29400", "--rdzv-id", "shardwise"]
        options = [*meeting, "--rdzv-conf", f"is_host={1 - node}", "--local-addr", BRIDGE[node]]
        inside = ("ip", "netns", "exec", name)
        processes.append(
            torchrun(file, "--nnodes", "2", "--nproc-per-node", "1", *options, inside=inside, GLOO_SOCKET_IFNAME=cable)
        )
    try:
        results = [cli.finish(process, 120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for _, out, err in results:
        print(out, err, sep="\n")  # shown if the test fails
    assert [code for code, _, _ in results] == [0, 0]
    assert sum(out.count("done: 4 steps") for _, out, _ in results) == 1
    losses = cli.losses(folder / "hosts")
    assert losses.keys() == local_losses.keys()
    assert max(abs(losses[step] - local_losses[step]) for step in losses) <= 1e-6
