"""The number of hosts a run may have, and checks that it fits each of them before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.core.errors import UserError

if TYPE_CHECKING:
    from shardwise.config.schema import Run


@dataclass(frozen=True)
class Hosts:
    """Minimum and maximum number of hosts."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


def parse_hosts(text: str) -> Hosts:
    """Parses `4`, or `2:4` for at least 2 and at most 4."""
    least, colon, limit = text.partition(":")
    numbers = [part for part in (least, limit if colon else least)]
    if not all(part.isdecimal() for part in numbers) or not 0 < int(numbers[0]) <= int(numbers[1]):
        raise UserError("--hosts", text, "is no number of hosts", "write e.g. 4, or 2:4 for at least 2 and at most 4")
    return Hosts(int(numbers[0]), int(numbers[1]))


def names_of(text: str) -> list[str]:
    """Host names from `a,b,c`, or from a file with one per line (a hostfile's `slots=8` is ignored)."""
    file = Path(text).expanduser()
    if file.is_file():
        lines = [line.partition("#")[0].split() for line in file.read_text().splitlines()]
        names = [words[0] for words in lines if words]
    else:
        names = [name.strip() for name in text.split(",")]
    bad = [name for name in names if not name or name.startswith("-") or any(letter.isspace() for letter in name)]
    if not names or bad:
        raise UserError("--ssh", text, "names no hosts", "write host-1,host-2, or a file with one host per line")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError("--ssh", text, f"{twice[0]} is given twice", "name each host once")
    return names


def check_sizes(run: Run, hosts: Hosts, ranks: int) -> None:
    """Checks batch and mesh for every number of hosts now, not when a host is lost after hours."""
    from shardwise.config.resolve import Machine, resolve_machine

    if run.left_open:  # the planner chooses for the hosts that are there
        return
    for number in range(hosts.least, hosts.most + 1):
        try:
            resolve_machine(run, Machine(ranks, ranks=number * ranks))
        except UserError as error:
            if hosts.least == hosts.most:
                raise
            problem = f"with {number} of {hosts} hosts ({number * ranks} ranks): {error.problem}"
            raise UserError(error.field, error.value, problem, _remedy(error, run, hosts, ranks)) from None


def _remedy(error: UserError, run: Run, hosts: Hosts, ranks: int) -> str:
    if error.field != "train.batch_size":
        return f"{error.remedy}, or allow other numbers of hosts"
    from math import lcm

    from shardwise.config.axes import data_ranks

    each = lcm(*(data_ranks(run.parallel, n * ranks) for n in range(hosts.least, hosts.most + 1)))
    near = max(1, round(run.train.batch_size / each)) * each
    return f"use a multiple of {each}, e.g. {near}, or allow other numbers of hosts"


def ranks_here(run: Run) -> int:
    """Ranks of this host by default: the run's, else one per GPU, else one."""
    if run.ranks != "auto":
        return int(run.ranks)
    if run.device == "cpu":
        return 1
    from shardwise.config.resolve import this_machine

    return this_machine().gpus or 1
