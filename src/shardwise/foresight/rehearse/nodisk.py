"""Files of a rehearsal's disk offload: sizes are recorded, nothing is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.effective_device import on_host
from shardwise.parallel.offload.disk import DiskTransfer
from shardwise.parallel.offload.pinned_memory import aligned


@dataclass
class NoFile:
    """Stands in for a DiskFile."""

    size: int
    bytes_read: int = 0
    bytes_written: int = 0
    direct: bool = True

    def read(self, offset: int, into: torch.Tensor) -> DiskTransfer:
        """Counts the bytes read, and completes at once."""
        self.bytes_read += into.numel()
        return DiskTransfer(())

    def write(self, offset: int, source: torch.Tensor, after: Any = None) -> DiskTransfer:
        """Counts the bytes written, and completes at once."""
        self.bytes_written += source.numel()
        return DiskTransfer(())

    def mapped(self, offset: int, size: int) -> torch.Tensor:
        """Returns host memory in place of a mapped file."""
        return on_host(size)

    def flush(self) -> None:
        """Does nothing: no data is buffered."""

    def close(self) -> None:
        """Does nothing: there is no file."""


@dataclass
class NoDisk:
    """Stands in for a DiskFolder."""

    files: list[NoFile] = field(default_factory=list)

    def create(self, name: str, size: int) -> NoFile:
        """Returns a file that takes no disk space."""
        self.files.append(NoFile(aligned(size)))
        return self.files[-1]

    def close(self) -> None:
        """Does nothing: there are no files."""
