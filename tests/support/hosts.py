"""Hosts in all that sockets can tell: network namespaces on one bridge, whose cables can be cut and mended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NETWORK = "10.214.78"


class Host:
    """One namespace: its name, its address, and the bridge's end of its cable."""

    def __init__(self, prefix: str, number: int) -> None:
        self.switch = f"{prefix}-switch"
        self.name, self.address = f"{prefix}-{number}", f"{NETWORK}.{number + 1}"
        self.inside = ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """As a switch that forgets the port: packets vanish, no connection is reset."""
        _ip("-n", self.switch, "link", "set", f"to-{self.address[-1]}", "nomaster")

    def mend(self) -> None:
        _ip("-n", self.switch, "link", "set", f"to-{self.address[-1]}", "master", "bridge")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def some_hosts(number: int) -> Iterator[list[Host]]:
    """Makes them, and takes them away again; skips the test where that is not allowed."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    prefix = f"shardwise-{os.getpid()}"
    hosts, switch = [Host(prefix, index) for index in range(number)], f"{prefix}-switch"
    try:
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for host in hosts:
                _ip("netns", "add", host.name)
                end = ("peer", "name", f"to-{host.address[-1]}", "netns", switch)
                _ip("link", "add", "eth0", "netns", host.name, "type", "veth", *end)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not to be had here: {error.stderr.strip()}")
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
            _ip("-n", switch, "link", "set", f"to-{host.address[-1]}", "up")
            host.mend()
        yield hosts
    finally:
        for name in (*(host.name for host in hosts), switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Agent:
    """`shardwise node` in the background; its lines with the time at which each came."""

    def __init__(self, file: Path, *options: str, inside: tuple[str, ...] = (), **env: str) -> None:
        command = [*inside, sys.executable, "-m", "shardwise", "node", str(file), *options]
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def when(self, words: str, within: float = 120, after: float = 0.0) -> float:
        """The time at which a line with these words came; waits for it."""
        deadline = time.monotonic() + within
        while True:
            found = [at for at, line in self.lines if words in line and at >= after]
            if found:
                return found[0]
            assert time.monotonic() < deadline, f"{words!r} was not said:\n{self.text}"
            assert self.process.poll() is None or self._reader.is_alive(), f"it ended:\n{self.text}"
            time.sleep(0.05)

    def finish(self, within: float = 180) -> int:
        """Waits for the end; the exit code."""
        try:
            return self.process.wait(within)
        finally:
            self.end()
            self._reader.join(5)

    def end(self) -> None:
        """Kills what is left of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
