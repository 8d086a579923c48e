"""The launcher: hostfile, filters, what it would start, and what it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.core.errors import UserError
from shardwise.deepspeed.hosts import as_filter, choose, parse_filter, read_hostfile
from shardwise.deepspeed.launch import main

HOSTS = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


def hostfile(folder: Path, text: str) -> Path:
    (folder / "hosts").write_text(text)
    return folder / "hosts"


def test_hostfile(tmp_path: Path) -> None:
    file = hostfile(tmp_path, "# two hosts\nworker-0 slots=4\n\n  worker-1   slots=4  # the other\n")
    assert read_hostfile(file) == HOSTS
    for text, problem in (
        ("worker-0 slots=4\nworker-0 slots=2", "twice"),
        ("worker-0 slot=4", "is no host"),
        ("worker-0 slots=0", "is no host"),
        ("# nothing", "names no host"),
    ):
        with pytest.raises(UserError, match=problem):
            read_hostfile(hostfile(tmp_path, text))
    with pytest.raises(UserError, match="cannot be read"):
        read_hostfile(tmp_path / "none")


def test_filters() -> None:
    assert choose(HOSTS, "worker-1:0,2@worker-0", "", -1, -1) == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 2]}
    assert choose(HOSTS, "", "worker-1:0@worker-0", -1, -1) == {"worker-1": [1, 2, 3]}
    assert choose(HOSTS, "", "", 1, 2) == {"worker-0": [0, 1]}
    assert choose(HOSTS, "", "", -1, -1) == HOSTS
    assert parse_filter("--slots", as_filter(HOSTS), HOSTS) == HOSTS
    for include, exclude, nodes, gpus, problem in (
        ("worker-0", "worker-1", -1, -1, "besides --include"),
        ("worker-0", "", 1, -1, "does not go with"),
        ("worker-9", "", -1, -1, "none of the hosts"),
        ("worker-0:7", "", -1, -1, "no slot 7"),
        ("worker-0:a", "", -1, -1, "no list of devices"),
        ("", "worker-0@worker-1", -1, -1, "leaves no device"),
        ("", "", 3, -1, "there are 2 hosts"),
        ("", "", -1, 5, "has 4 slots"),
    ):
        with pytest.raises(UserError, match=problem):
            choose(HOSTS, include, exclude, nodes, gpus)


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One ssh command per host, which names the ranks' places; settings and quotes survive it."""
    file = hostfile(tmp_path, "worker-0 slots=2\nworker-1 slots=4\n")
    monkeypatch.setenv("NCCL_DEBUG", "WARN now")
    (tmp_path / ".deepspeed_env").write_text("TOKEN=a b\n")
    monkeypatch.chdir(tmp_path)
    command = [
        "--hostfile",
        str(file),
        "--exclude",
        "worker-1:0",
        "--ssh_port",
        "22",
        "--dry-run",
        "train.py",
        "--x",
        "y z",
    ]
    assert main(command) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ssh -tt -o BatchMode=yes -p 22 worker-0 ") and " worker-1 " in second
    for line, node in ((first, 0), (second, 1)):
        assert "worker-0:0,1@worker-1:1,2,3" in line and f"--node_rank {node} --master_addr worker-0" in line
        assert "NCCL_DEBUG=" in line and "WARN now" in line and "TOKEN=" in line and "y z" in line


def test_a_hosts_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the second host starts: its ranks follow the first host's."""
    (tmp_path / "train.py").write_text("")
    command = ["--slots", "a:0,1@b:1,3", "--node_rank", "1", "--master_addr", "a", "--dry-run"]
    assert main([*command, str(tmp_path / "train.py"), "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for local, line in enumerate(lines):
        assert f"RANK={2 + local} LOCAL_RANK={local} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2" in line
        assert "MASTER_ADDR=a MASTER_PORT=29500" in line and "CUDA_VISIBLE_DEVICES=1,3" in line
        assert line.endswith(f"--local_rank={local} --steps 3")


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, message in (
        ([str(tmp_path / "none.py")], "no such file"),
        (["--num_nodes", "2", "x.py"], "hostfile"),
        (["--autotuning", "tune", "x.py"], "autotuning"),
        (["--launcher", "openmpi", "x.py"], "openmpi"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err


def test_runs_here(tmp_path: Path) -> None:
    """Two ranks meet through the launcher; when one fails, the other is ended and the exit code is the first's."""
    (tmp_path / "train.py").write_text(
        "import sys, time\n"
        "import shardwise.deepspeed as deepspeed, torch\n"
        "deepspeed.init_distributed()\n"
        "rank = deepspeed.comm.get_rank()\n"
        "total = torch.tensor([rank + 1.0]); deepspeed.comm.all_reduce(total)\n"
        "print(f'rank {rank} of {deepspeed.comm.get_world_size()}: {total.item()} {sys.argv[1:]}', flush=True)\n"
        "if 'fail' in sys.argv:\n"
        "    sys.exit(7) if rank == 1 else time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "shardwise", "deepspeed", "--num_gpus", "2"]
    logs = ["--enable_each_rank_log", str(tmp_path / "logs")]
    done = subprocess.run(
        [*command, *logs, str(tmp_path / "train.py"), "a"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        said = (tmp_path / f"logs/rank-{rank}.log").read_text()
        assert f"rank {rank} of 2: 3.0 ['--local_rank={rank}', 'a']" in said
    failed = subprocess.run([*command, str(tmp_path / "train.py"), "fail"], capture_output=True, text=True, timeout=200)
    assert failed.returncode == 7 and "rank 1 ended with exit code 7" in failed.stderr
