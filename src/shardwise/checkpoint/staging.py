"""Copies the state to be saved to host buffers, so that training resumes while it is written.

[Note: beside the next step] After the optimizer's step neither parameters nor states change until the next one. On a
GPU the copy to the host therefore runs on a stream of its own while the next forward and backward compute; the thread
that writes waits for it, and so does the device before it updates anything (`settle`). The training thread waits for
nothing. What else may change before (a model's buffers, counters on the host) is copied at once.

The host's memory is page-locked and reused from save to save: on a GPU locking it takes longer than the copy, on a CPU
fresh pages cost five times the copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.parallel.offload.pinned_memory import host_buffers


@dataclass
class StagingSource:
    """A tensor in parts that follow each other along its first dimension, wherever they are stored."""

    shape: torch.Size
    dtype: torch.dtype
    parts: Iterable[torch.Tensor]  # gone through once, on the stream that copies
    steady: bool = True  # only updates change it

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class Staged:
    """Host tensors that are valid once `wait` has returned."""

    tensors: list[torch.Tensor]
    copied: Any = None  # a CUDA event

    def wait(self) -> list[torch.Tensor]:
        """Returns the tensors, as they were when they were staged."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tensors


class Staging:
    """Host buffers for one save; the next may be staged when the last is written."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._buffers: list[torch.Tensor] = []
        self._stream: Any = None
        self._copied: Any = None

    def stage(self, sources: Sequence[StagingSource], device: torch.device) -> Staged:
        """Starts to copy; on a CPU it is done on return."""
        sizes = [source.nbytes for source in sources]
        if sizes != self._sizes:
            self._buffers = []  # first: there may be no room for both
            self._buffers = host_buffers(sizes, device)
            self._sizes = sizes
        hosts = [b.view(s.dtype).view(s.shape) for b, s in zip(self._buffers, sources, strict=True)]
        if device.type != "cuda":
            for host, source in zip(hosts, sources, strict=True):
                _fill(host, source.parts)
            return Staged(hosts)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        parts: list[Iterable[torch.Tensor]] = []
        for source in sources:
            parts.append(source.parts if source.steady else [part.clone() for part in source.parts])
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for host, source_parts in zip(hosts, parts, strict=True):
                _fill(host, source_parts, self._stream)
            self._copied = torch.cuda.Event(blocking=True)  # who waits for it on the host sleeps
            self._copied.record()
        return Staged(hosts, self._copied)

    def settle(self) -> None:
        """Makes the device's next operations wait for the copy: from here on the state may change."""
        if self._copied is not None and self._copied.query():
            self._copied = None
        if self._copied is not None:  # not forgotten: updates during backward may come on several streams
            self._copied.wait()


def _fill(host: torch.Tensor, parts: Iterable[torch.Tensor], stream: Any = None) -> None:
    """Copies parts one after the other."""
    row = 0
    for part in parts:
        target = host[row : row + len(part)] if host.dim() else host
        target.copy_(part, non_blocking=stream is not None)
        row += len(target) if host.dim() else 0
        if part.is_cuda:
            part.record_stream(stream)  # whoever frees it, its memory is nobody's before it is read
