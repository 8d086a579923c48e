"""Tensor files in the format of PyTorch's distributed checkpoint, written in one pass that also hashes them.

For 224 tensors in 107 MB PyTorch's own writing took 0.3 s of CPU time, half of it to serialise each tensor anew (a zip
archive of seven records, with a checksum), and reading the file back to hash it another 0.07. What surrounds a tensor's
bytes depends on its shape and dtype alone, so it is made once. The archive's own checksum of the tensor stays empty, as
PyTorch leaves it where it is told to (`torch.serialization.set_crc32_options`): the manifest has a better one.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from shardwise.core.compat.torch_private import StorageInfo

CHUNK = 1 << 20  # bytes that are hashed and then written while the processor's cache still has them


class TensorFiles:
    """Writes a rank's tensors; caches what surrounds them in the archive."""

    def __init__(self) -> None:
        self._around: dict[tuple[torch.dtype, torch.Size], tuple[bytes, bytes]] = {}

    def write(
        self, file: Path, items: Iterable[tuple[WriteItem, torch.Tensor | io.BytesIO]], durable: bool
    ) -> tuple[list[WriteResult], tuple[int, str]]:
        """Writes one after the other, holding one at a time; returns their locations, and the file's size and hash."""
        results = []
        digest = hashlib.sha256()
        position = 0
        with file.open("wb") as stream:
            for item, data in items:
                start = position
                for part in self._parts(data):
                    for chunk in (part[i : i + CHUNK] for i in range(0, len(part), CHUNK)):
                        digest.update(chunk)
                        stream.write(chunk)
                    position += len(part)
                results.append(
                    WriteResult(item.index, position - start, _StorageInfo(file.name, start, position - start))
                )
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        return results, (position, digest.hexdigest())

    def _parts(self, data: torch.Tensor | io.BytesIO) -> list[Any]:
        if isinstance(data, io.BytesIO):
            return [data.getbuffer()]
        data = data.detach().cpu().contiguous()
        assert type(data) is torch.Tensor and data.layout is torch.strided, "as planners hand out"
        kind = (data.dtype, data.shape)
        if kind not in self._around:
            self._around[kind] = _around(*kind)
        before, after = self._around[kind]
        return [before, memoryview(data.reshape(-1).view(torch.uint8).numpy()), after]  # type: ignore[arg-type]


class _Split:
    """A file that records what is written to it, and where a tensor's bytes were skipped."""

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[]]

    def write(self, data: Any) -> int:
        self.parts[-1].append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int) -> int:
        assert offset > 0 and whence == os.SEEK_CUR
        self.parts.append([])
        return 0

    def flush(self) -> None: ...


def _around(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the bytes of such a tensor."""
    recorded = _Split()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), recorded)  # type: ignore[arg-type]  # its memory is never touched
    if shape.numel() == 0:  # nothing was left out
        return b"".join(recorded.parts[0]), b""
    before, after = (b"".join(part) for part in recorded.parts)
    return before, after
