"""Files for states that do not fit in memory: parallel reads and writes, by direct I/O if possible.

Direct I/O matters for more than speed: the page cache would fill the host's memory with states that
are used once a step. It requires aligned offsets, lengths and addresses, so every range here begins
and ends on a page.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.config.units import human
from shardwise.core.errors import RunFailed, UserError
from shardwise.parallel.offload.pinned_memory import aligned

PART = 8 << 20  # bytes of one request
THREADS = 8
FREE_SPACE = "free some space or choose a folder on another disk"


@dataclass(frozen=True)
class DiskTransfer:
    """A read or write in progress."""

    parts: tuple[Future[None], ...]

    def wait(self) -> None:
        """Returns when the transfer is done; raises if any part failed."""
        for part in self.parts:
            part.result()


class FileInUse(Exception):
    """Another process has locked this file."""


class DiskFile:
    """One file of this rank, reserved at full length, in ranges that begin and end on a page."""

    def __init__(self, path: Path, size: int, pool: ThreadPoolExecutor) -> None:
        self.path = path
        self.size = aligned(size)
        self._pool = pool
        self.bytes_read = 0
        self.bytes_written = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT
        self.direct = True
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self._file = os.open(path, flags, 0o600)
        try:
            # Held until the process ends, however it ends: two runs in one folder would overwrite
            # each other's states.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise FileInUse(path) from None
        except OSError:
            pass  # a file system without locks
        # Runs at interpreter exit at the latest.
        self._closed = weakref.finalize(self, _close, self._file, path)
        os.ftruncate(self._file, 0)  # drops what a killed run left
        if self.size:  # a full disk is reported now, before the first step
            os.posix_fallocate(self._file, 0, self.size)

    def read(self, offset: int, into: torch.Tensor) -> DiskTransfer:
        """Starts to fill a page-aligned buffer from the file."""
        self.bytes_read += into.numel()
        return self._each_part(os.preadv, offset, into)

    def write(self, offset: int, source: torch.Tensor, after: Any = None) -> DiskTransfer:
        """Starts to write a page-aligned buffer, once `after` (a CUDA event) has happened."""
        self.bytes_written += source.numel()
        return self._each_part(os.pwritev, offset, source, after)

    def mapped(self, offset: int, size: int) -> torch.Tensor:
        """A range of the file as a memory-mapped tensor, for initialisation and checkpoints."""
        file = torch.from_file(str(self.path), shared=True, size=self.size, dtype=torch.uint8)
        return file[offset : offset + size]

    def flush(self) -> None:
        """Writes changes made through `mapped` to the file, so that direct reads see them."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes and removes the file: it is of no use to another process."""
        self._closed()

    def _each_part(
        self, call: Any, offset: int, buffer: torch.Tensor, after: Any = None
    ) -> DiskTransfer:
        memory = memoryview(buffer.numpy())  # type: ignore[arg-type]
        parts = []
        for start in range(0, len(memory), PART):
            part = memory[start : start + PART]
            parts.append(self._pool.submit(self._transfer, call, offset + start, part, after))
        return DiskTransfer(tuple(parts))

    def _transfer(self, call: Any, offset: int, memory: memoryview, after: Any) -> None:
        if after is not None:
            after.synchronize()
        done = 0
        while done < len(memory):
            try:
                count = call(self._file, [memory[done:]], offset + done)
            except OSError as error:
                reason = error.strerror or error
                raise RunFailed(f"offload.disk: {self.path} failed ({reason})") from error
            if count <= 0:
                raise RunFailed(f"{self.path} ends early at byte {offset + done}")
            done += count


def _close(file: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(file)


class DiskFolder:
    """A rank's working files. They are scratch: a resumed run refills them from its checkpoint."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder = folder / f"rank-{rank}"
        remove_left_overs(folder, ranks)
        self.pool = ThreadPoolExecutor(THREADS, "disk")
        self.files: list[DiskFile] = []

    def create(self, name: str, size: int) -> DiskFile:
        """A file of this size; a full or unwritable disk is the user's to fix."""
        try:
            file = DiskFile(self.folder / name, size, self.pool)
        except FileInUse:
            folder = str(self.folder.parent)
            problem = "another run works in this folder"
            remedy = "end it, or choose another folder"
            raise UserError("offload.disk", folder, problem, remedy) from None
        except OSError as error:
            problem = f"cannot hold {size / 2**30:.2f} GiB of {name} ({error.strerror or error})"
            raise UserError("offload.disk", str(self.folder), problem, FREE_SPACE) from None
        self.files.append(file)
        return file

    def close(self) -> None:
        """Closes and removes all files, and the folder."""
        self.pool.shutdown(wait=True)
        for file in self.files:
            file.close()
        _remove_empty(self.folder)
        _remove_empty(self.folder.parent)

    def __enter__(self) -> DiskFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def remove_left_overs(folder: Path, first: int = 0) -> None:
    """Removes the working files of killed ranks from `first` on, except locked ones."""
    for rank in folder.glob("rank-*"):
        if not rank.name[5:].isdecimal() or int(rank.name[5:]) < first:
            continue
        for file in rank.glob("*.bin"):
            with contextlib.suppress(OSError), file.open("rb") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()
        _remove_empty(rank)
    if first == 0:  # else other ranks may be about to create theirs in it
        _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def check_disk(folder: Path, size: int) -> None:
    """Raises before training if the folder cannot be written or has no room for `size` bytes."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            pass
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        remedy = "choose a folder you may write to"
        raise UserError("offload.disk", str(folder), problem, remedy) from None
    # Existing files are from a killed run or from faster ranks; either way their space is reused.
    reusable = sum(file.stat().st_size for file in folder.glob("rank-*/*.bin"))
    free = shutil.disk_usage(existing).free
    if free + reusable < size:
        problem = f"has {human(free)} free; the offloaded states take {human(size)}"
        raise UserError("offload.disk", str(folder), problem, FREE_SPACE)
