"""Copies of a run's state in host memory, which outlive its ranks; does not import torch.

  /dev/shm/shardwise-UID/       for this user only
    TOKEN/                      of a run: its output folder holds the token (checkpoints/.memory)
      HOST/                     of a host's agent: those of several on one machine do not mix
        held                    locked by the ranks while they live
        reached                 the last completed step
        step-00000012.3/        a copy of step 12, made by the run's third start: as a checkpoint on disk, but with some
                                files only (this host's and a peer's); its manifest names all

A start that went back to step 9 invalidates copies of later steps by earlier starts, wherever they turn up again: so
the token's file also records from which step each start began.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.integrity import MANIFEST, Damage, read_manifest
from shardwise.core.errors import UserError

ROOT_VARIABLE, HOST_VARIABLE = "SHARDWISE_MEMORY", "SHARDWISE_HOST"
FILE = ".memory"  # in the run's folder of checkpoints
HELD, REACHED = "held", "reached"
GENERATIONS = 2  # copies kept at a time, with the one that is being made
STALE = 3600.0  # seconds after which copies that nobody holds are of a run that will not come back
_TOKEN = re.compile(r"[0-9a-f]{16}")
_COPY = re.compile(r"step-(\d{8,})\.(\d+)")


def root() -> Path:
    """Returns this user's folder in shared memory."""
    return Path(os.environ.get(ROOT_VARIABLE) or "/dev/shm") / f"shardwise-{os.getuid()}"


def host_name(name_given: str | None = None) -> str:
    """Returns this host's name within the run: the agent's name for it, else its own."""
    name = name_given or os.environ.get(HOST_VARIABLE) or socket.gethostname()
    return re.sub(r"[^\w-]", "_", name) or "host"


def make_private(folder: Path) -> None:
    """Creates a folder that only this user can access; rejects one that belongs to somebody else."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError("checkpoint.memory", str(folder), "is not a folder of yours alone", "have it removed")


@dataclass(frozen=True)
class Life:
    """A run's token, and the step from which each of its starts began."""

    token: str
    began: tuple[int, ...] = ()

    def counts(self, step: int, start: int) -> bool:
        """Whether a copy of this step by this start (the first is 1) is part of what later starts resumed from."""
        return 0 < start <= len(self.began) and all(step <= other for other in self.began[start:])


def read_life(checkpoints: Path) -> Life | None:
    """Returns what a run's checkpoint folder records about its copies in memory; None if there is no record."""
    try:
        values = json.loads((checkpoints / FILE).read_text())
        life = Life(str(values["token"]), tuple(int(step) for step in values["began"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return life if _TOKEN.fullmatch(life.token) else None


def new_life() -> Life:
    """Returns the record of a run without copies."""
    return Life(secrets.token_hex(8))


def write_life(checkpoints: Path, life: Life) -> None:
    """Saves the record for later starts of this run."""
    temporary = checkpoints / f"{FILE}.new"
    temporary.write_text(json.dumps({"token": life.token, "began": life.began}))
    temporary.replace(checkpoints / FILE)


@dataclass(frozen=True)
class FoundCopy:
    """A copy on this host: its step and start, a seal shared by all hosts' parts of it, and the files present."""

    name: str
    step: int
    start: int
    seal: str
    files: frozenset[str]
    all_files: frozenset[str]

    @property
    def whole(self) -> bool:
        """Whether all of its files are on this host."""
        return self.files == self.all_files


def copy_name(step: int, start: int) -> str:
    """Returns the folder name of a copy."""
    return f"step-{step:08d}.{start}"


def list_copies(folder: Path, life: Life) -> list[FoundCopy]:
    """Returns the valid copies of a run on this host, oldest first; sizes are checked, contents are not."""
    copies = []
    for path in folder.glob("step-*") if folder.is_dir() else ():
        name = _COPY.fullmatch(path.name)
        files = read_manifest(path) if name else None
        if name is None or files is None or isinstance(files, Damage):
            continue
        step = int(name[1])
        start = int(name[2])
        if life.counts(step, start):
            present = frozenset(n for n, (size, _) in files.items() if _size(path / n) == size)
            seal = (path / MANIFEST).read_text().partition("\n")[0]
            copies.append(FoundCopy(path.name, step, start, seal, present, frozenset(files)))
    return sorted(copies, key=lambda copy: (copy.step, copy.start))


def newest_copy(output: Path, host: str | None = None, complete_only: bool = True) -> int:
    """Returns the step of the newest copy on this host, by default of complete ones only; -1 if there is none."""
    life = read_life(output / "checkpoints")
    if life is None:
        return -1
    copies = list_copies(root() / life.token / host_name(host), life)
    return max((copy.step for copy in copies if copy.whole or not complete_only), default=-1)


def forget_copies(output: Path, host: str | None = None) -> None:
    """Frees this host's memory of a run's copies."""
    if (life := read_life(output / "checkpoints")) is not None:
        remove(root() / life.token / host_name(host))


@contextlib.contextmanager
def freed(output: Path, resumable: type[BaseException]) -> Iterator[None]:
    """Frees this host's copies after a run, unless the same command would resume from them."""
    try:
        yield
    except resumable:
        raise
    except BaseException:
        forget_copies(output)
        raise
    forget_copies(output)


def remove(folder: Path) -> None:
    """Removes a host's folder, and those above it if they are then empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def sweep(kept_tokens: Sequence[str] = (), older: float = STALE) -> list[Path]:
    """Removes copies of dead runs: not held by a process and not written to for an hour."""
    removed = []
    for folder in root().glob("*/*") if root().is_dir() else ():
        if folder.parent.name in kept_tokens or not folder.is_dir():
            continue
        with contextlib.suppress(OSError):
            last = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - last > older and not _held(folder / HELD):
                remove(folder)
                removed.append(folder)
    return removed


def hold(folder: Path) -> int:
    """Marks a host's folder as in use while this process lives; returns the handle."""
    handle = os.open(folder / HELD, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def _held(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def read_reached(folder: Path) -> int:
    """Returns the last step that ranks of this host completed; -1 if unknown."""
    try:
        return int((folder / REACHED).read_text())
    except (OSError, ValueError):
        return -1


def _size(file: Path) -> Any:
    try:
        return file.stat().st_size
    except OSError:
        return None
