"""Hashes of every file of a checkpoint, and verification before anything is loaded.

PyTorch's distributed checkpoint has no integrity check of its own: flipped bytes load in silence. The manifest names
every file with size and SHA-256 and carries a digest of itself; it is the last file written, so a folder without one is
not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Damage:
    """A file that is not as it was written."""

    file: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.file} {self.reason}"


def digest_file(file: Path) -> tuple[int, str]:
    """Returns size and SHA-256 of a file, flushed to disk first."""
    with file.open("rb") as f:
        os.fsync(f.fileno())
        return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()


def write_manifest(folder: Path, files: dict[str, tuple[int, str]]) -> None:
    """Seals a folder: after this every byte in it is accounted for."""
    path = folder / MANIFEST
    path.write_bytes(_encode({name: list(entry) for name, entry in sorted(files.items())}))
    with path.open("rb") as f:
        os.fsync(f.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _encode(files: dict[str, list[int | str]]) -> bytes:
    body = json.dumps(files, indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"digest": "{digest}",\n"files": {body}}}\n'.encode()


def read_manifest(folder: Path) -> dict[str, tuple[int, str]] | Damage:
    """Returns the files that a checkpoint must have, or what is wrong with its manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return Damage(path, "is missing, so the checkpoint was never completed")
    raw = path.read_bytes()
    try:
        files = json.loads(raw)["files"]
        # Encoding again and comparing bytes also catches damage that JSON would forgive.
        if _encode(files) != raw:
            raise ValueError
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return Damage(path, f"names a file outside the checkpoint ({name})")
        return {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Damage(path, "is damaged: it does not match its own digest")


def verify(folder: Path, share: int = 0, shares: int = 1) -> list[Damage]:
    """Returns the damage in this share of the files (ranks divide the work); empty if they are intact."""
    files = read_manifest(folder)
    if isinstance(files, Damage):
        return [files]
    damages = []
    for name, (size, digest) in list(files.items())[share::shares]:
        file = folder / name
        if not file.is_file():
            damages.append(Damage(file, "is missing"))
        elif (actual := file.stat().st_size) != size:
            damages.append(Damage(file, f"has {actual:,} bytes instead of {size:,}"))
        elif digest_file(file)[1] != digest:
            damages.append(Damage(file, "is damaged: its hash does not match"))
    return damages
