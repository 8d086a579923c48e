"""Runs the real command in a process of its own, watches it and kills its ranks."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from shardwise.config.advanced import as_written
from support.ranks import forking


def write_run(folder: Path, run: dict[str, Any]) -> Path:
    """RUN.yaml in a folder; `run` has settings by their paths in Run."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(as_written(run)))
    return file


def start(file: Path, *overrides: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`shardwise train` in the background."""
    command = [sys.executable, "-m", "shardwise", "train", str(file), *overrides]
    all_env = os.environ | dict(env or {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=all_env)


def command(*words: str | Path, stdin: str = "", timeout: float = 240) -> tuple[int, str, str]:
    """Any `shardwise` command to its end: exit code, standard output, standard error.

    In a process forked from one that has imported it (see ranks.py), which spares the seconds of the imports. Where
    other libraries read the environment when they are imported, `fresh_command` is needed.
    """
    with tempfile.TemporaryDirectory() as folder:
        texts = {name: Path(folder) / name for name in ("in", "out", "err")}
        texts["in"].write_text(stdin)
        process = forking().Process(
            target=_command, args=([*map(str, words)], [*texts.values()], dict(os.environ), os.getcwd())
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise AssertionError(f"{words} did not end:\n{texts['out'].read_text()}\n{texts['err'].read_text()}")
        assert process.exitcode is not None
        return process.exitcode, texts["out"].read_text(), texts["err"].read_text()


def _command(words: list[str], texts: list[Path], env: dict[str, str], folder: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, (text, mode) in enumerate(zip(texts, ("r", "w", "w"), strict=True)):
        with open(text, mode) as opened:
            os.dup2(opened.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = ["shardwise", *words]
    runpy.run_module("shardwise", run_name="__main__", alter_sys=True)


def fresh_command(*words: str | Path) -> tuple[int, str, str]:
    """As `command`, in a process that imports everything anew."""
    line = [sys.executable, "-m", "shardwise", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout, done.stderr


def finish(process: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def train(file: Path, *overrides: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Runs `shardwise train` to its end; with an environment of its own, in a process that imports everything anew."""
    return finish(start(file, *overrides, env=env)) if env else command("train", file, *overrides)


def steps_done(output: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
    except OSError:
        return 0


def wait_for_step(process: subprocess.Popen[str], output: Path, step: int, timeout: float = 120) -> None:
    """Returns once a step is done."""
    deadline = time.monotonic() + timeout
    while steps_done(output) < step:
        assert process.poll() is None, f"ended early: {process.communicate()}"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)


def rank_process(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of one rank."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"rank {rank} is not running")


def rank_processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes below the command."""
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process], within: float = 60.0) -> bool:
    """Whether none of these processes runs any more; one that nobody has waited for yet has ended too."""
    deadline = time.monotonic() + within
    while left := [p for p in processes if _runs(p)]:
        if time.monotonic() > deadline:
            for one in left:
                one.kill()
            return False
        time.sleep(0.05)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_rank(process: subprocess.Popen[str], rank: int) -> None:
    """`kill -9`, by id."""
    rank_process(process, rank).send_signal(signal.SIGKILL)


def losses(output: Path) -> dict[int, float]:
    """Training loss by step; a step recorded twice would be a fault."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in records if r["kind"] == "train"]
    assert steps == sorted(set(steps)), "a step was recorded twice or out of order"
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}
