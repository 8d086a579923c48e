"""The ranks of a verification as the command sees them: work goes in, results come out, no process is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.core.cpu_probe import cpu_env
from shardwise.core.errors import Interrupted, RunFailed

HOST = [sys.executable, "-m", "shardwise.foresight.verify.host"]
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks:
    """The process that ranks are forked from; it and its descendants form one group and end together."""

    def __init__(self, environment: dict[str, str], model: Path, device: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                [*HOST, str(os.getpid()), str(model), device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log_file, env=environment, start_new_session=True,
            )  # fmt: skip

    def ask(self, work: dict[str, Any]) -> list[dict[str, Any]]:
        """Runs work on the ranks and returns the result of each."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the next line will tell
            process.stdin.write(json.dumps(work).encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            log_lines = self._log.read_text(errors="replace").strip().splitlines() or ["no words"]
            raise RunFailed(f"the process of the ranks ended: {log_lines[-1]}\n  → --keep FOLDER keeps the logs")
        results: list[dict[str, Any]] = json.loads(line)
        return results

    def end(self) -> None:
        """Kills the whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def first_failure(results: list[dict[str, Any]]) -> tuple[int, dict[str, Any]] | None:
    """Returns the failed rank that is most informative: those that lost a peer are least."""
    failed = [(rank, entry) for rank, entry in enumerate(results) if "failed" in entry]
    order = {"user": 0, "bug": 1, "lost": 2}
    return min(failed, key=lambda entry: order[entry[1]["kind"]], default=None)


@contextmanager
def unlaunched() -> Iterator[None]:
    """Removes a launcher's variables from the environment inside the block."""
    launched = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(launched)


@contextmanager
def ranks(precision: str, device: str, folder: Path) -> Iterator[Ranks]:
    """Starts a host for ranks inside the block; logs are written to `folder`/claims."""
    environment = dict(os.environ) | {"TOKENIZERS_PARALLELISM": "false", "SHARDWISE_PROGRESS": "off"}
    for name in LAUNCHED:
        environment.pop(name, None)
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": ""} | cpu_env(precision)
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    (folder / "claims").mkdir(exist_ok=True)
    host = Ranks(environment, folder / "model", device, folder / "claims" / "host.log")
    try:
        yield host
    finally:
        host.end()


@contextmanager
def stopped_by_sigterm(consequence: str = "nothing was certified") -> Iterator[None]:
    """Makes SIGTERM behave like Ctrl-C inside the block: children end and partial output is removed."""
    previous: Any = None

    def stop(number: int, frame: Any) -> None:
        raise Interrupted(f"stopped: {consequence}", 128 + number)

    with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
        previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


@contextmanager
def heeding_interrupts() -> Iterator[Callable[[], None]]:
    """Yields a function that raises if Ctrl-C was pressed: an import on the way may have swallowed it."""
    received: list[int] = []

    def on_interrupt(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    previous: Any = None
    with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
        previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield check
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
