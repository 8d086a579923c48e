"""SSH: one agent per host over one connection each, followed from here and stopped with Ctrl-C.

Stopping is a word on the agent's input, not the end of the connection: so the ranks can save while we still listen.
A broken connection is re-established; meanwhile the other hosts continue without that one.
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


def commands(submission: Submission) -> dict[str, list[str]]:
    """For each host the command that starts its agent."""
    first = submission.address or submission.ssh[0].rpartition("@")[2]
    place = f"[{first}]" if ":" in first else first
    commands_by_host = {}
    for host in submission.ssh:
        name = host.rpartition("@")[2]
        node = submission.node(HERE, "--name", name, "--rendezvous", f"{place}:{submission.port or PORT}", "--listen")
        # Values that must not be seen come through the connection: a command line is for all to read.
        secrets = [f"IFS= read -r {variable} && export {variable}" for variable in (*submission.passed, VARIABLE)]
        steps = [
            f"cd {shlex.quote(str(submission.folder))}",
            *secrets,
            *submission.exports(),
            *submission.lines,
            f"exec {node}",
        ]
        commands_by_host[host] = ["ssh", *OPTIONS, *shlex.split(os.environ.get("SHARDWISE_SSH_OPTIONS", "")), host,
                       " && ".join(steps)]  # fmt: skip
    return commands_by_host


def text(submission: Submission) -> str:
    """The commands, one line per host."""
    return "".join(shlex.join(command) + "\n" for command in commands(submission).values())


class _Connection:
    """The connection to one host's agent, re-established when it breaks."""

    def __init__(self, host: str, command: list[str], secrets: list[str]) -> None:
        self.host = host
        self._command = command
        self._secrets = secrets
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
            self.code = self.process.poll()
            self.ended = time.monotonic()
            if self.code is not None:
                self.reader.join(5)
        return self.code


def run(submission: Submission) -> int:
    """Starts all agents, prints their output prefixed by host, and returns the first host's exit code."""
    program = tool("ssh", "--ssh")
    for name in submission.passed:
        if "\n" in os.environ[name]:
            raise UserError("--env", name, "has several lines, which cannot be passed on", "keep it in a file there")
    secrets = [*(os.environ[name] for name in submission.passed), make_token()]
    connections = [
        _Connection(host, [program, *command[1:]], secrets) for host, command in commands(submission).items()
    ]
    signals: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for connection in connections:
            if len(signals) == 1:
                connection.say("stop")
            elif connection.process.poll() is None:
                connection.process.terminate()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _watch(connections, submission, signals)
    finally:
        for connection in connections:
            if connection.process.poll() is None:
                connection.process.terminate()
                connection.process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(connections: list[_Connection], submission: Submission, signals: list[int]) -> int:
    while True:
        codes = [connection.poll() for connection in connections]
        if None not in codes:
            final = [code for code in codes if code not in (None, BROKEN)]
            return codes[0] if codes[0] not in (None, BROKEN) else max(final, default=1)
        broken = [connection for connection in connections if connection.code == BROKEN]
        unreachable = [connection for connection in broken if not connection.spoke]
        least = submission.hosts.least
        if unreachable and len(connections) - len(unreachable) < least and not signals:
            _say(f"{unreachable[0].host} cannot be reached, and at least {least} hosts are needed: stopping")
            signals.append(signal.SIGTERM)
            for connection in connections:
                connection.say("stop")
        for connection in broken:
            if not signals and time.monotonic() - connection.ended > AGAIN:
                _say(f"connecting to {connection.host} again")
                connection.start()
        time.sleep(0.2)


def _say(words: str) -> None:
    print(f"shardwise: {words}", file=sys.stderr, flush=True)
