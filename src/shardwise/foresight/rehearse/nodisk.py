"""Working files of a rehearsal: their sizes are noted, nothing is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.core.effective_device import on_host
from shardwise.parallel.offload.disk import DiskTransfer
from shardwise.parallel.offload.pinned_memory import aligned


@dataclass
class NoFile:
    """Stands for a DiskFile."""

    size: int
    bytes_read: int = 0
    bytes_written: int = 0
    direct: bool = True

    def read(self, offset: int, into: torch.Tensor) -> DiskTransfer:
        """Has happened."""
        self.bytes_read += into.numel()
        return DiskTransfer(())

    def write(self, offset: int, source: torch.Tensor, after: Any = None) -> DiskTransfer:
        """Has happened."""
        self.bytes_written += source.numel()
        return DiskTransfer(())

    def mapped(self, offset: int, size: int) -> torch.Tensor:
        """Bytes that are not on the device."""
        return on_host(size)

    def flush(self) -> None:
        """Nothing is there to be written."""

    def close(self) -> None:
        """Nothing is there to be removed."""


@dataclass
class NoDisk:
    """Stands for a DiskFolder."""

    files: list[NoFile] = field(default_factory=list)

    def create(self, name: str, size: int) -> NoFile:
        """A file that takes no room."""
        self.files.append(NoFile(aligned(size)))
        return self.files[-1]

    def close(self) -> None:
        """Nothing is there to be removed."""
