"""Sends files from rank to rank, in pieces, through a process group: no port is opened for it.

Only members of the run's own process group can take part.
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
    """Returns for each rank the rank of the next host that stores its copy; empty if there is one host."""
    members = _members(hosts)
    if len(members) == 1:
        return {}
    order = list(members)
    following = dict(zip(order, order[1:] + order[:1], strict=True))
    return {
        rank: members[following[host]][index % len(members[following[host]])]
        for host, ranks in members.items()
        for index, rank in enumerate(ranks)
    }


def fetches(
    needed: Sequence[Iterable[str]], hosts: Sequence[str], holders: dict[str, list[str]], sizes: dict[str, int]
) -> list[FileTransfer]:
    """Returns the transfers that give every host the files its ranks need; the work is spread over ranks."""
    members = _members(hosts)
    transfers: list[FileTransfer] = []
    for host, ranks in members.items():
        missing = {name for rank in ranks for name in needed[rank] if host not in holders[name]}
        for name in sorted(missing):
            sources = members[holders[name][len(transfers) % len(holders[name])]]
            number = len(transfers)
            transfers.append(
                FileTransfer(sources[number % len(sources)], ranks[number % len(ranks)], name, sizes[name])
            )
    return transfers


def _members(hosts: Sequence[str]) -> dict[str, list[int]]:
    """The ranks of each host, in order."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return members


def reserve(folder: Path, transfers: Iterable[FileTransfer], rank: int) -> None:
    """Allocates space for what this rank is to receive: a lack of it is an error here, but a crash on write."""
    for transfer in transfers:
        if transfer.target == rank:
            file = folder / transfer.name
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                if transfer.size:
                    os.posix_fallocate(handle, 0, transfer.size)
            finally:
                os.close(handle)


def move(folder: Path, transfers: Sequence[FileTransfer], group: dist.ProcessGroup) -> None:
    """Transfers the files; every rank of the group calls it with the same list, after `reserve`."""
    rank = dist.get_rank(group)
    own = [
        (tag, transfer)
        for tag, transfer in enumerate(transfers)
        if rank in (transfer.source, transfer.target) and transfer.size
    ]
    mapped = {
        tag: torch.from_file(str(folder / transfer.name), shared=True, size=transfer.size, dtype=torch.uint8)
        for tag, transfer in own
    }
    # Both ends of a transfer are at its k-th piece in their k-th round, so no rank waits for one that waits for it.
    for start in range(0, max((transfer.size for _, transfer in own), default=0), PIECE):
        under_way: list[Any] = []
        for tag, transfer in own:
            if start < transfer.size:
                piece = mapped[tag][start : start + PIECE]
                if rank == transfer.source:
                    under_way.append(dist.isend(piece, group=group, group_dst=transfer.target, tag=tag))
                else:
                    under_way.append(dist.irecv(piece, group=group, group_src=transfer.source, tag=tag))
        for work in under_way:
            work.wait()
