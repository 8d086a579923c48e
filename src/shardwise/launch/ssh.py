"""SSH: one agent per host at the end of one connection each, all followed here, and stopped with Ctrl-C.

Stopping is a word on the agent's input, not the end of the connection: so the ranks can save while we still listen.
A connection that breaks is made again; meanwhile the other hosts go on without that one.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

from shardwise.core.errors import UserError
from shardwise.launch.submission import HERE, PORT, Submission, tool
from shardwise.launch.token import VARIABLE, make_token

BROKEN = 255  # ssh's own exit code for a connection that it could not make or lost
AGAIN = 5.0  # seconds until it is tried again
OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o",
           "ConnectTimeout=10")  # fmt: skip


def commands(asked: Submission) -> dict[str, list[str]]:
    """For each host the command that starts its agent."""
    first = asked.address or asked.ssh[0].rpartition("@")[2]
    place = f"[{first}]" if ":" in first else first
    found = {}
    for host in asked.ssh:
        name = host.rpartition("@")[2]
        node = asked.node(HERE, "--name", name, "--rendezvous", f"{place}:{asked.port or PORT}", "--listen")
        # Values that must not be seen come through the connection: a command line is for all to read.
        secrets = [f"IFS= read -r {one} && export {one}" for one in (*asked.passed, VARIABLE)]
        steps = [f"cd {shlex.quote(str(asked.folder))}", *secrets, *asked.exports(), *asked.lines, f"exec {node}"]
        found[host] = ["ssh", *OPTIONS, *shlex.split(os.environ.get("SHARDWISE_SSH_OPTIONS", "")), host,
                       " && ".join(steps)]  # fmt: skip
    return found


def text(asked: Submission) -> str:
    """What would be run, one line per host."""
    return "".join(shlex.join(command) + "\n" for command in commands(asked).values())


class _Connection:
    """One host's agent, made again when its connection breaks."""

    def __init__(self, host: str, command: list[str], secrets: list[str]) -> None:
        self.host, self._command, self._secrets = host, command, secrets
        self.code: int | None = None
        self.ended, self.spoke = 0.0, False
        self.start()

    def start(self) -> None:
        self.code = None
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self.reader.start()
        for secret in self._secrets:
            self.say(secret)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        name = self.host.rpartition("@")[2]
        for line in process.stdout:
            self.spoke |= f"[{name}]".encode() in line
            print(f"{name} | {line.decode(errors='replace').rstrip()}", flush=True)

    def poll(self) -> int | None:
        """The agent's exit code, or BROKEN; None while it runs."""
        if self.code is None:
            self.code, self.ended = self.process.poll(), time.monotonic()
            if self.code is not None:
                self.reader.join(5)
        return self.code


def run(asked: Submission) -> int:
    """Starts all, shows what they say with the host's name before it, and returns the first host's exit code."""
    program = tool("ssh", "--ssh")
    for name in asked.passed:
        if "\n" in os.environ[name]:
            raise UserError("--env", name, "has several lines, which cannot be passed on", "keep it in a file there")
    secrets = [*(os.environ[name] for name in asked.passed), make_token()]
    connections = [_Connection(host, [program, *command[1:]], secrets) for host, command in commands(asked).items()]
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for one in connections:
            if len(signals) == 1:
                one.say("stop")
            elif one.process.poll() is None:
                one.process.terminate()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _watch(connections, asked, signals)
    finally:
        for one in connections:
            if one.process.poll() is None:
                one.process.terminate()
                one.process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(connections: list[_Connection], asked: Submission, signals: list[int]) -> int:
    while True:
        codes = [one.poll() for one in connections]
        if None not in codes:
            final = [code for code in codes if code not in (None, BROKEN)]
            return codes[0] if codes[0] not in (None, BROKEN) else max(final, default=1)
        broken = [one for one in connections if one.code == BROKEN]
        never = [one for one in broken if not one.spoke]
        if never and len(connections) - len(never) < asked.hosts.least and not signals:
            _say(f"{never[0].host} cannot be reached, and at least {asked.hosts.least} hosts are needed: stopping")
            signals.append(signal.SIGTERM)
            for one in connections:
                one.say("stop")
        for one in broken:
            if not signals and time.monotonic() - one.ended > AGAIN:
                _say(f"connecting to {one.host} again")
                one.start()
        time.sleep(0.2)


def _say(words: str) -> None:
    print(f"shardwise: {words}", file=sys.stderr, flush=True)
