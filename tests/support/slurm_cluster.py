"""A Slurm of its own in a folder: a controller and some node daemons on this machine, ended by their ids."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shardwise.launch.rendezvous_link import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
CONFIG = """\
ClusterName=tiny
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0
KillWait=60
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


@contextmanager
def slurm(folder: Path, nodes: int = 2) -> Iterator[dict[str, str]]:
    """Starts it; what the environment needs to use it."""
    if os.geteuid() != 0 or not all(shutil.which(name) for name in PROGRAMS):
        pytest.skip("a Slurm of our own needs root, slurmctld, slurmd and munge")
    names, host = [f"n{number}" for number in range(1, nodes + 1)], socket.gethostname()
    lines = [f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1" for n in names]
    (folder / "state").mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, port=free_port(), folder=folder, nodes="\n".join(lines)))
    env = os.environ | {"SLURM_CONF": str(config)}
    files = {part: f"--{part}-file={folder}/munged.{part}" for part in ("pid", "log", "seed")}
    munged = ["munged", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket", "--force", *files.values()]
    try:
        for command in (munged, ["slurmctld"], *(["slurmd", "-N", name] for name in names)):
            subprocess.run(command, check=True, env=env, capture_output=True)
        deadline = time.monotonic() + 60
        while _idle(env) < nodes:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.5)
        yield {"SLURM_CONF": str(config)}
    finally:
        # Jobs end before their daemons do: nobody would end their steps otherwise.
        subprocess.run(["scancel", "--user=root"], env=env, capture_output=True, check=False)
        deadline = time.monotonic() + 90
        while _idle(env) < nodes and time.monotonic() < deadline:
            time.sleep(0.5)
        for name in (*(f"slurmd-{name}" for name in names), "slurmctld", "munged"):
            _end(folder / f"{name}.pid")


def _idle(env: dict[str, str]) -> int:
    said = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=env, capture_output=True, text=True, check=False)
    return said.stdout.split().count("idle")


def _end(pid: Path) -> None:
    try:
        process = psutil.Process(int(pid.read_text()))
        children = process.children(recursive=True)
        process.terminate()
        process.wait(20)
        for child in children:
            if child.is_running():
                child.kill()
    except (OSError, ValueError, psutil.Error):
        pass
