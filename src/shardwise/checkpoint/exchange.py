"""Files that go from rank to rank, piece by piece, through a process group: no port is opened for it.

Whoever may take part in the run's own collectives may take part in this, and nobody else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PIECE = 32 << 20  # bytes under way at a time, per file


@dataclass(frozen=True)
class FileTransfer:
    """A file that one rank sends and another writes, under the same name in its own host's folder."""

    source: int
    target: int
    name: str
    size: int


def ring(hosts: Sequence[str]) -> dict[int, int]:
    """For each rank, by its host: the rank of the next host that keeps its copy; empty where there is one host."""
    members = _members(hosts)
    if len(members) == 1:
        return {}
    order = list(members)
    following = dict(zip(order, order[1:] + order[:1], strict=True))
    return {
        rank: members[following[host]][place % len(members[following[host]])]
        for host, ranks in members.items()
        for place, rank in enumerate(ranks)
    }


def fetches(
    wanted: Sequence[Iterable[str]], hosts: Sequence[str], holders: dict[str, list[str]], sizes: dict[str, int]
) -> list[FileTransfer]:
    """What must be moved for every host to have the files that its ranks want; the work is spread over ranks."""
    members = _members(hosts)
    found: list[FileTransfer] = []
    for host, ranks in members.items():
        missing = {name for rank in ranks for name in wanted[rank] if host not in holders[name]}
        for name in sorted(missing):
            sources = members[holders[name][len(found) % len(holders[name])]]
            number = len(found)
            found.append(FileTransfer(sources[number % len(sources)], ranks[number % len(ranks)], name, sizes[name]))
    return found


def _members(hosts: Sequence[str]) -> dict[str, list[int]]:
    """The ranks of each host, in order."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return members


def reserve(folder: Path, transfers: Iterable[FileTransfer], rank: int) -> None:
    """Takes the memory for what this rank is to receive: a lack of it is an error here, and a crash when written to."""
    for one in transfers:
        if one.target == rank:
            file = folder / one.name
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                if one.size:
                    os.posix_fallocate(handle, 0, one.size)
            finally:
                os.close(handle)


def move(folder: Path, transfers: Sequence[FileTransfer], group: dist.ProcessGroup) -> None:
    """Carries files out; every rank of the group calls it with the same list, after `reserve`."""
    rank = dist.get_rank(group)
    mine = [(tag, one) for tag, one in enumerate(transfers) if rank in (one.source, one.target) and one.size]
    mapped = {
        tag: torch.from_file(str(folder / one.name), shared=True, size=one.size, dtype=torch.uint8) for tag, one in mine
    }
    # Both ends of a transfer are at its k-th piece in their k-th round, so no rank waits for one that waits for it.
    for begin in range(0, max((one.size for _, one in mine), default=0), PIECE):
        under_way: list[Any] = []
        for tag, one in mine:
            if begin < one.size:
                piece = mapped[tag][begin : begin + PIECE]
                if rank == one.source:
                    under_way.append(dist.isend(piece, group=group, group_dst=one.target, tag=tag))
                else:
                    under_way.append(dist.irecv(piece, group=group, group_src=one.source, tag=tag))
        for work in under_way:
            work.wait()
