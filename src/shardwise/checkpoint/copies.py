"""Checkpoints in the memory of a host and of one peer, so that little is lost when one of them dies.

Every few steps each rank writes its shard to its host's memory (host_copies.py), in the format of checkpoints on disk,
and in the background to that of the next host in a ring. A copy counts once every shard is on both; two are kept, so
that a crash while one is made leaves the other.

After a crash the remaining hosts tell each other what they hold. The run resumes from the newest copy of which every
file is on one of them, with the right hash: a rank reads what is on its own host, and the rest is sent by a rank of a
host that has it. Any number of ranks and hosts will do, as with checkpoints on disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor

from shardwise.checkpoint import host_copies
from shardwise.checkpoint.exchange import FileTransfer, fetches, move, reserve, ring
from shardwise.checkpoint.folders import newest_step
from shardwise.checkpoint.host_copies import GENERATIONS, FoundCopy, Life
from shardwise.checkpoint.integrity import MANIFEST, Damage, digest_file, read_manifest, write_manifest
from shardwise.checkpoint.store import RUN, STATE, TRAINER, failure_words
from shardwise.checkpoint.writing import Digests, Pending, StateWriter
from shardwise.config.units import Every
from shardwise.core.compat.torch_private import local_tensor
from shardwise.core.errors import RunFailed
from shardwise.core.safe_pickle import SafeReader

INDEX = f"{STATE}/.metadata"
SMALL = (INDEX, TRAINER, RUN, MANIFEST)  # which every host has
SPARE = 2 << 30  # bytes that copies leave of a host's free memory


class Votes(Protocol):
    """What the ranks agreed on at the start of the step (train/control.py)."""

    busy: bool
    copy_due: bool


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A copy to resume from: this host's folder of it, and which hosts hold each file."""

    folder: Path
    step: int
    holders: dict[str, list[str]]
    sizes: dict[str, int]
    digests: dict[str, str]


class MemoryCheckpoints:
    """The in-memory checkpoints of one run, as seen by one rank. All methods are collective unless stated otherwise."""

    def __init__(self, checkpoints: Path, group: dist.ProcessGroup, afresh: bool) -> None:
        """`afresh`: do not resume from earlier copies."""
        self._checkpoints = checkpoints
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        name = f"{host_copies.host_name()} {_boot()}"
        self._hosts = self._gather(name)
        self._host = name
        self._leads = self._hosts.index(name) == self._rank
        before = host_copies.read_life(checkpoints) if self._rank == 0 else None
        life = host_copies.new_life() if self._rank == 0 and (before is None or afresh) else before
        box: list[Any] = [before, life]
        dist.broadcast_object_list(box, group=group, group_src=0)
        before, self._life = box
        if self._leads and before is not None and before.token != self._life.token:
            host_copies.remove(self._folder_of(before))
        self.folder = self._folder_of(self._life)
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            host_copies.make_private(folder)
        self._held = host_copies.hold(self.folder)
        if self._leads:
            host_copies.sweep(kept_tokens=[self._life.token])
            for left_over in self.folder.glob(".step-*"):
                shutil.rmtree(left_over, ignore_errors=True)
        self._reached = os.open(self.folder / host_copies.REACHED, os.O_CREAT | os.O_RDWR, 0o600)
        self.lost_from = max(self._gather(host_copies.read_reached(self.folder)))
        self._next = ring(self._hosts)
        self._writer = StateWriter(group, durable=False, background=True)
        self._worker: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._notes: list[str] = []
        self._last: int | None = None
        self._off = self._measured = False

    def _folder_of(self, life: Life) -> Path:
        return host_copies.root() / life.token / host_copies.host_name()

    def _gather(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self._size
        dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    # Going on from one.

    def find(self, beyond: int) -> MemoryCheckpoint | None:
        """Returns the newest complete copy of a later step than `beyond`, every file verified; None if none."""
        everyone: list[list[FoundCopy]] = self._gather(
            host_copies.list_copies(self.folder, self._life) if self._leads else []
        )
        held = {self._hosts[rank]: copies_found for rank, copies_found in enumerate(everyone) if copies_found}
        while (chosen := _newest(held, beyond)) is not None:
            bad = {name for part in self._gather(self._verify(held, chosen)) for name in part}
            if not bad:
                return self._prepare(held, chosen)
            held = _without(held, chosen.name, bad)
        return None

    def _verify(self, held: dict[str, list[FoundCopy]], chosen: FoundCopy) -> set[tuple[str, str]]:
        """This rank's share of this host's files: those that are damaged, with the host."""
        own_copies = [copy for copy in held.get(self._host, []) if (copy.name, copy.seal) == (chosen.name, chosen.seal)]
        if not own_copies:
            return set()
        folder = self.folder / chosen.name
        files = read_manifest(self.folder / chosen.name)
        if isinstance(files, Damage):
            return {(self._host, name) for name in own_copies[0].files}
        ranks = [rank for rank, host in enumerate(self._hosts) if host == self._host]
        share = sorted(own_copies[0].files)[ranks.index(self._rank) :: len(ranks)]
        damaged = {name for name in share if digest_file(folder / name)[1] != files[name][1]}
        for name in damaged:
            (folder / name).unlink(missing_ok=True)
        return {(self._host, name) for name in damaged}

    def _prepare(self, held: dict[str, list[FoundCopy]], chosen: FoundCopy) -> MemoryCheckpoint:
        """Gives every host the small files; tensor files are fetched once it is known who reads which."""
        holders: dict[str, list[str]] = {}
        for host, copies_found in held.items():
            for copy in copies_found:
                if (copy.name, copy.seal) == (chosen.name, chosen.seal):
                    for name in copy.files:
                        holders.setdefault(name, []).append(host)
        sender = self._hosts.index(next(h for h in holders[INDEX] if all(h in holders[n] for n in (TRAINER, RUN))))
        folder = self.folder / chosen.name
        box: list[Any] = [None]
        if self._rank == sender:
            box = [{name: (folder / name).read_bytes() for name in SMALL}]
        dist.broadcast_object_list(box, group=self._group, group_src=sender)
        if self._leads:
            for name, content in box[0].items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
        dist.barrier(group=self._group)
        files = read_manifest(folder)
        assert not isinstance(files, Damage)
        sizes = {name: size for name, (size, _) in files.items()}
        digests = {name: digest for name, (_, digest) in files.items()}
        return MemoryCheckpoint(folder, chosen.step, holders, sizes, digests)

    def reader(self, copy: MemoryCheckpoint) -> SafeReader:
        """Returns a reader of a copy's tensors, wherever they are."""
        return _CopyReader(copy, self)

    def fetch(self, copy: MemoryCheckpoint, needed: set[str]) -> None:
        """Transfers the files that this host's ranks need to this host."""
        transfers = fetches(self._gather(needed), self._hosts, copy.holders, copy.sizes)
        self._carry(copy.folder, transfers)
        received = [transfer for transfer in transfers if transfer.target == self._rank]
        damaged = [
            transfer
            for transfer in received
            if digest_file(copy.folder / transfer.name)[1] != copy.digests[transfer.name]
        ]
        if damaged_anywhere := [transfer for part in self._gather(damaged) for transfer in part]:
            raise RunFailed(
                f"{damaged_anywhere[0].name} of a copy in memory was damaged on its way from "
                f"rank {damaged_anywhere[0].source}"
            )

    def began(self, step: int) -> None:
        """Records that the run resumes from this step: copies of later steps are invalid."""
        self._life = Life(self._life.token, (*self._life.began, step))
        if self._rank == 0:
            host_copies.write_life(self._checkpoints, self._life)
        if self._leads:
            valid_names = {copy.name for copy in host_copies.list_copies(self.folder, self._life)}
            self._keep(valid_names)
        self.done(step)
        self._last = step

    # Making them.

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing the last copy, or can write no more; not collective."""
        making = self._worker is not None and self._worker.is_alive()
        return making or self._off or self._failure is not None

    def due(self, step: int, every: Every | None, votes: Votes) -> bool:
        """Whether the interval has passed and no rank is busy; the same on every rank."""
        counted = every is not None and every.steps is not None and step - (self._last or 0) >= every.steps
        return not votes.busy and (counted or votes.copy_due)

    def done(self, step: int) -> None:
        """Records, for a later start, that this step was completed."""
        if self._leads:
            os.pwrite(self._reached, f"{step:020d}".encode(), 0)

    def save(self, step: int, tensors: dict[str, Any], trainer: dict[str, Any], run_json: str) -> None:
        """Stages the state and returns; the rest is done in the background. Only when no rank is busy.

        On a GPU the copy is still under way then: see `settle`.
        """
        self._last = step
        if not self._fits(tensors):
            return
        partial = self.folder / f".{host_copies.copy_name(step, len(self._life.began))}"
        (partial / STATE).mkdir(parents=True, exist_ok=True)
        pending = self._writer.begin(tensors)
        written: list[Digests] | None = None
        if not pending.staged:
            try:
                written = pending.write(partial / STATE)
            except BaseException as failure:  # as all ranks do
                self._failure = failure
                return
        small = {TRAINER: json.dumps(trainer, indent=1).encode(), RUN: run_json.encode()}
        self._worker = threading.Thread(target=self._finish, args=(partial, pending, written, small), daemon=True)
        self._worker.start()

    def settle(self) -> None:
        """Call before anything that was staged is changed: see CheckpointStore. Not collective."""
        self._writer.settle()

    def _finish(self, partial: Path, pending: Pending, written: list[Digests] | None, small: dict[str, bytes]) -> None:
        try:
            if self._leads:  # the newest stays, whole on all hosts; with the one now made they are two
                kept_copies = host_copies.list_copies(self.folder, self._life)[1 - GENERATIONS :]
                self._keep({partial.name, *(copy.name for copy in kept_copies)})
            written = written or pending.write(partial / STATE)
            everyone: list[Digests] = []
            for part in written:
                everyone.append({f"{STATE}/{name}": entry for name, entry in part.items()})
            box = [small | {INDEX: (partial / INDEX).read_bytes()} if self._rank == 0 else None]
            dist.broadcast_object_list(box, group=self._group, group_src=0)
            transfers = [
                FileTransfer(rank, self._next[rank], name, size)
                for rank, files in enumerate(everyone if self._next else [])
                for name, (size, _) in files.items()
            ]
            self._carry(partial, transfers)
            if self._leads:
                for name, content in (box[0] or {}).items():
                    (partial / name).write_bytes(content)
                files = {name: entry for part in everyone for name, entry in part.items()}
                files |= {name: digest_file(partial / name) for name in box[0] or {}}
                write_manifest(partial, files)
                target = partial.with_name(partial.name.removeprefix("."))
                shutil.rmtree(target, ignore_errors=True)
                partial.rename(target)
            dist.barrier(group=self._group)
        except BaseException as failure:  # DCP's own exception derives from BaseException
            self._failure = failure

    def _carry(self, folder: Path, transfers: list[FileTransfer]) -> None:
        """Moves files; if one rank lacks the memory for what it is to receive, no rank starts."""
        problem = ""
        try:
            reserve(folder, transfers, self._rank)
        except OSError as error:
            problem = f"rank {self._rank} cannot keep another host's part ({error.strerror or error})"
        if problems := [reported for reported in self._gather(problem) if reported]:
            raise RunFailed(problems[0])
        move(folder, transfers, self._group)
        dist.barrier(group=self._group)

    def _fits(self, tensors: dict[str, Any]) -> bool:
        """Whether every host has the memory; asked once, before the first copy."""
        if self._measured:
            return True
        self._measured = True
        bytes_per_host = dict.fromkeys(self._hosts, 0.0)
        for host, rank_bytes in zip(
            self._hosts, self._gather(sum(_bytes(v, self._size) for v in tensors.values())), strict=True
        ):
            bytes_per_host[host] += rank_bytes
        stored_peer = {self._hosts[target]: self._hosts[source] for source, target in self._next.items()}
        needed = int(
            GENERATIONS
            * (bytes_per_host[self._host] + (bytes_per_host[stored_peer[self._host]] if stored_peer else 0.0))
        )
        free = psutil.virtual_memory().available - SPARE - bytes_per_host[self._host]  # to copy it aside
        room = int(min(shutil.disk_usage(self.folder).free, free))
        short_of_memory = [
            report for report in self._gather((needed, room, self._host) if needed > room else None) if report
        ]
        if short_of_memory:
            needed, room, host = short_of_memory[0]
            self._stop(
                f"no copies in memory: {host.split()[0]} would need {_human(needed)} in "
                f"{host_copies.root().parent}, and {_human(max(0, room))} can be had (checkpoint.memory; a "
                "container's own limit is --shm-size)"
            )
            return False
        where = f", with those of {stored_peer[self._host].split()[0]}" if stored_peer else ""
        self._notes.append(f"copies in memory: up to {_human(needed)} on this host{where}")
        return True

    def _stop(self, reason: str) -> None:
        self._off = True
        self._failure = None
        self._notes.append(reason)
        if self._leads:
            for left_over in self.folder.glob(".step-*"):
                shutil.rmtree(left_over, ignore_errors=True)

    def _keep(self, names: set[str]) -> None:
        for path in self.folder.glob("*step-*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def notes(self) -> list[str]:
        """Returns this rank's notes, each once."""
        if self._failure is not None:
            self._stop(f"no more copies in memory: {failure_words(self._failure)}")
        notes = [*self._notes, *self._writer.notes()]
        self._notes = []
        return notes

    def close(self) -> None:
        """Waits for the last copy and frees the memory: the run is over, or was saved to disk."""
        if self._worker is not None:
            self._worker.join()
        self.drop()

    def drop(self) -> None:
        """Frees this host's memory at once; not collective."""
        with contextlib.suppress(OSError):
            os.close(self._held)
            os.close(self._reached)
        self._off = True
        if self._leads:
            host_copies.remove(self.folder)

    def lost_note(self, step: int) -> str:
        """Returns how many steps are lost by starting at this step, if that is known."""
        lost = self.lost_from - step
        steps = f"{lost} step{'s' * (lost != 1)} lost" if lost >= 0 else ""
        disk = newest_step(self._checkpoints)
        on_disk = f"the newest on disk is of step {disk}" if 0 <= disk < step else ""
        details = "; ".join(part for part in (steps, on_disk) if part)
        return f" ({details})" if details else ""


class NoMemoryCheckpoints:
    """In-memory checkpoints of a run that makes none."""

    busy = False

    def find(self, beyond: int) -> MemoryCheckpoint | None:
        return None

    def reader(self, copy: MemoryCheckpoint) -> SafeReader:
        raise AssertionError("there is none to read")

    def lost_note(self, step: int) -> str:
        return ""

    def began(self, step: int) -> None: ...

    def due(self, step: int, every: Every | None, votes: Votes) -> bool:
        return False

    def save(self, step: int, tensors: dict[str, Any], trainer: dict[str, Any], run_json: str) -> None: ...

    def settle(self) -> None: ...

    def done(self, step: int) -> None: ...

    def notes(self) -> list[str]:
        return []

    def drop(self) -> None: ...

    def close(self) -> None: ...


class _CopyReader(SafeReader):
    """Reads from this host's folder, once the other hosts' files that this rank needs are there."""

    def __init__(self, copy: MemoryCheckpoint, copies: MemoryCheckpoints) -> None:
        super().__init__(copy.folder / STATE)
        self._copy = copy
        self._copies = copies

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Fetches and reads; every rank takes part once, whatever it needs."""
        needed = {f"{STATE}/{self.storage_data[item.storage_index].relative_path}" for item in plan.items}
        self._copies.fetch(self._copy, needed)
        return super().read_data(plan, planner)


def _newest(held: dict[str, list[FoundCopy]], beyond: int) -> FoundCopy | None:
    """The newest copy of which every file is on some host."""
    parts: dict[tuple[int, int, str], list[FoundCopy]] = {}
    for copies_found in held.values():
        for copy in copies_found:
            if copy.step > beyond:
                parts.setdefault((copy.step, copy.start, copy.seal), []).append(copy)
    for _, group in sorted(parts.items(), reverse=True):
        available: frozenset[str] = frozenset().union(*(copy.files for copy in group))
        has_small_files = any({INDEX, TRAINER, RUN} <= copy.files for copy in group)
        if available == group[0].all_files and has_small_files:
            return group[0]
    return None


def _without(held: dict[str, list[FoundCopy]], name: str, bad: set[tuple[str, str]]) -> dict[str, list[FoundCopy]]:
    """What is held, less files that proved damaged."""
    remaining: dict[str, list[FoundCopy]] = {}
    for host, copies_found in held.items():
        damaged = {file for file_host, file in bad if file_host == host}
        remaining[host] = []
        for copy in copies_found:
            remaining[host].append(replace(copy, files=copy.files - damaged) if copy.name == name else copy)
    return remaining


def _bytes(value: Any, ranks: int) -> float:
    """Bytes of a tensor that this rank writes, as replicas are written once."""
    tensor = getattr(value, "outline", value)
    if not isinstance(tensor, torch.Tensor):
        return 0.0
    if not isinstance(tensor, DTensor):
        return tensor.numel() * tensor.element_size() / ranks
    local = local_tensor(tensor)
    mesh = tensor.device_mesh
    size = local.numel() * local.element_size()
    return size / math.prod(mesh.size(i) for i, p in enumerate(tensor.placements) if p.is_replicate())


def _human(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _boot() -> str:
    """Distinguishes machines that have the same name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
