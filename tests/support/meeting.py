"""A real meeting point in a process of its own, and runs that meet there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.tiny import tiny_run


class Point:
    """`shardwise diloco-server` on a free port; it can be killed and started again at the same one."""

    def __init__(self, state: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.state, self.options, self.env = state, options, dict(os.environ) | (env or {})
        self.port = 0
        self.start()

    def start(self) -> None:
        words = [
            sys.executable,
            "-m",
            "shardwise",
            "diloco-server",
            "--port",
            str(self.port),
            "--state",
            str(self.state),
        ]
        self.process = subprocess.Popen(
            [*words, *self.options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env
        )
        assert self.process.stdout is not None
        said = ""
        while not (found := re.search(r"sync server at .*:(\d+) \(", said)):  # it may first say where it goes on
            line = self.process.stdout.readline()
            assert line, said + self.process.communicate()[1]
            said += line
        self.port = int(found[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        """As the worst would have it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def stop(self) -> tuple[int, str]:
        """Ctrl-C; its exit code and what it said."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out + err

    def rounds(self) -> list[dict[str, Any]]:
        """What rounds.jsonl says."""
        file = self.state / "rounds.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@contextlib.contextmanager
def meeting_point(state: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[Point]:
    """A meeting point for the length of a test."""
    point = Point(state, *options, env=env)
    try:
        yield point
    finally:
        if point.process.poll() is None:
            point.kill()


def worker_run(folder: Path, point: Point, name: str, every: int = 4, **changes: Any) -> dict[str, Any]:
    """A tiny run that meets others."""
    run = tiny_run(folder, output=str(folder / name), **changes)
    return run | {"diloco": {"server": point.address, "sync_every": every, "name": name, "connect_timeout": 60}}


def meetings(output: Path) -> list[dict[str, Any]]:
    """The records of a worker's meetings."""
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "meet"]
