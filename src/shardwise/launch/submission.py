"""Shared by all launchers: the submission, the agent's command line, and calls of external programs.

To add a launcher: a module like slurm.py, its row in SUBMIT here and in command.py, and its option in cli/main.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardwise.config.units import in_words, parse_duration
from shardwise.core.errors import RunFailed, UserError
from shardwise.launch.hosts import Hosts

PORT = 29400
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Submission:
    """A run to be launched elsewhere."""

    run_file: Path
    overrides: tuple[str, ...]
    hosts: Hosts
    name: str
    output: Path
    folder: Path  # where it was asked for: hosts that share the file system run there
    written: str = ""  # the output folder as RUN.yaml has it
    gpus: int | None = None  # of each host; None = no request, ranks are found there
    gpu: str | None = None  # which
    cpus: int | None = None
    memory: str | None = None
    minutes: int | None = None
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    passed: tuple[str, ...] = ()  # variables whose values are not written down
    lines: tuple[str, ...] = ()
    volume: str | None = None
    ssh: tuple[str, ...] = ()
    address: str | None = None
    restarts: int = 3
    grace: int = 300
    port: int | None = None
    ranks: int | None = None

    def node(self, program: Sequence[str], *more: str, file: str | None = None) -> str:
        """The agent's command line for a shell; each launcher adds the rendezvous address."""
        words = [*program, "node", file or str(self.run_file), *self.overrides, "--hosts", str(self.hosts)]
        ranks = self.ranks or self.gpus
        words += ["--ranks", str(ranks)] if ranks else []
        return shlex.join([*words, "--restarts", str(self.restarts), "--grace", str(self.grace), *more])

    def exports(self) -> list[str]:
        """Shell lines that export the variables given with their values."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]


class Backend(Protocol):
    """A launcher: renders, submits, follows, cancels and queries a job."""

    def text(self, submission: Submission) -> str:
        """Returns the script or manifest."""

    def submit(self, submission: Submission, text: str) -> str:
        """Submits it; returns the job's identity."""

    def follow(self, identity: str, submission: Submission) -> int:
        """Prints the job's log until it ends; returns the exit code."""

    def cancel(self, identity: str) -> None:
        """Cancels the job; its ranks save."""

    def status(self, identity: str) -> str:
        """Returns the job's state."""


HERE = (sys.executable, "-m", "shardwise")  # on hosts that share this one's file system
INSTALLED = ("shardwise",)  # in an image


def parse_env(entries: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables given as NAME=VALUE, and names whose values are passed on without being written down."""
    values, passed = {}, []
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not _NAME.fullmatch(name):
            raise UserError("--env", entry, "is no variable", "write NAME=VALUE, or NAME to pass it on")
        if not equals and name not in os.environ:
            problem = "is not set here"
            remedy = f"set it here, or write {name}=VALUE where the value is no secret"
            raise UserError("--env", entry, problem, remedy)
        if equals:
            values[name] = value
        else:
            passed.append(name)
    return values, tuple(passed)


def parse_minutes(text: str | None) -> int | None:
    """Parses `90`, `4h`, `2d` or `1:30:00` to minutes."""
    if text is None:
        return None
    if match := re.fullmatch(r"(\d+)(min|m|h|d)?", text):
        minutes = int(match[1]) * {"h": 60, "d": 1440}.get(match[2] or "", 1)
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        minutes = int(match[1] or 0) * 1440 + int(match[2]) * 60 + int(match[3]) + (int(match[4]) > 0)
    else:
        minutes = 0
    if minutes < 1:
        raise UserError("--time", text, "is no time", "write e.g. 90min, 4h, 2d or 04:00:00")
    return minutes


def parse_seconds(option: str, text: str, least: float = 0.0) -> float:
    """Parses `30s`, `10min`, `1h` to seconds; a bare number is seconds."""
    remedy = "write e.g. 30s, 10min or 1h"
    try:
        seconds = float(parse_duration(text))
    except ValueError as error:
        raise UserError(option, text, str(error), remedy) from None
    if not seconds >= least:
        raise UserError(option, text, f"must be at least {in_words(least)}", remedy)
    return seconds


def single_line(option: str, text: str) -> str:
    """Returns the text; rejects line breaks, which would start a new line in a script."""
    if any(letter in text for letter in "\r\n\0"):
        raise UserError(option, text, "has more than one line", "give it as one line")
    return text


SUBMIT = ("sbatch", "sky", "ssh")  # what a launch begins with: --dry-run shows what they would be given


def tool(name: str, purpose: str) -> str:
    """Path of an external program; raises UserError if it is not installed."""
    path = shutil.which(name)
    if path is None:
        remedy = "install it, or use --dry-run" if name in SUBMIT else "install it, or ask where it is"
        raise UserError(name, None, f"is not installed here, and {purpose} needs it", remedy)
    return path


def output_of(command: Sequence[str], stdin: str | None = None) -> str:
    """Output of an external program; raises RunFailed with its error message."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr or done.stdout).strip()
        raise RunFailed(f"{shlex.join(command[:3])} … ended with exit code {done.returncode}: {message}")
    return done.stdout


def follow_file(file: Path, alive: Callable[[], bool], pause: Callable[[], None]) -> None:
    """Prints a growing file until its writer has ended and everything is read."""
    position = 0
    while True:
        ended = not alive()
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(position)
                text = stream.read()
            position += len(text)
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
        if ended:
            return
        pause()


def as_yaml(*documents: Any) -> str:
    """Formats manifests as YAML documents."""
    import yaml

    return yaml.safe_dump_all(documents, sort_keys=False, default_flow_style=False, width=1000)
