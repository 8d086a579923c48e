"""The ranks of a proof as the command sees them: work goes in, what each found comes out, and none stays behind."""

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
    """The process that ranks are forked from, and all of its descendants: one group, ended together."""

    def __init__(self, environment: dict[str, str], model: Path, device: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as words:
            self._process = subprocess.Popen(
                [*HOST, str(os.getpid()), str(model), device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=words, env=environment, start_new_session=True,
            )  # fmt: skip

    def ask(self, work: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank found."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the next line will tell
            process.stdin.write(json.dumps(work).encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            words = self._log.read_text(errors="replace").strip().splitlines() or ["no words"]
            raise RunFailed(f"the process of the ranks ended: {words[-1]}\n  → --keep FOLDER keeps the logs")
        found: list[dict[str, Any]] = json.loads(line)
        return found

    def end(self) -> None:
        """Leaves no process behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def first_failure(found: list[dict[str, Any]]) -> tuple[int, dict[str, Any]] | None:
    """Of ranks that failed, the one that tells most: those that lost a peer tell least."""
    failed = [(rank, one) for rank, one in enumerate(found) if "failed" in one]
    order = {"user": 0, "bug": 1, "lost": 2}
    return min(failed, key=lambda one: order[one[1]["kind"]], default=None)


@contextmanager
def unlaunched() -> Iterator[None]:
    """Without what a launcher left in the environment: a proof brings its own ranks."""
    launched = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(launched)


@contextmanager
def ranks(precision: str, device: str, folder: Path) -> Iterator[Ranks]:
    """A host for the claims of a proof; its log and theirs lie in `folder`/claims."""
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
def stopped_by_sigterm(what: str = "nothing was certified") -> Iterator[None]:
    """SIGTERM leaves as Ctrl-C does: what was begun is ended, and what was written is taken away."""
    previous: Any = None

    def stop(number: int, frame: Any) -> None:
        raise Interrupted(f"stopped: {what}", 128 + number)

    with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
        previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


@contextmanager
def heeding_interrupts() -> Iterator[Callable[[], None]]:
    """Gives a function that raises if Ctrl-C was pressed: code on the way (an import) may have swallowed it."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    def check() -> None:
        if heard:
            raise KeyboardInterrupt

    previous: Any = None
    with contextlib.suppress(ValueError):  # not the main thread: leave signals alone
        previous = signal.signal(signal.SIGINT, hear)
    try:
        yield check
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
