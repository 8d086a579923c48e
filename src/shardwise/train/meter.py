"""Collects each step's figures on the device, and turns them into records at report time.

Reading a number from the device waits for it; so steps only append tensors, and `flush` reads them
all at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from shardwise.data.loader import StepBatch
from shardwise.observe.memory import device_memory


@dataclass(frozen=True)
class _PendingRecord:
    step: int
    rate: float
    loss: torch.Tensor
    norm: torch.Tensor
    batch: StepBatch


@dataclass(frozen=True)
class Work:
    """FLOPs per token, and the peak FLOP/s of all devices if known, for the MFU."""

    flops_per_token: float
    peak: float | None = None


class Meter:
    """Per-step loss, norm and speed, reduced over ranks at report time."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        total: int,
        seconds: float,
        work: Work,
        sources: Sequence[str] = (),
        figures: Sequence[str] = (),
    ) -> None:
        """`seconds`: training time of earlier sessions; `figures`: names of the objective's."""
        self._group = group
        self._device = device
        self.total = total
        self._pending: list[_PendingRecord] = []
        self._started = time.monotonic()
        self._before = seconds
        self._last = self._started
        self._paused = 0.0
        self._first_step: int | None = None
        self._work = work
        self._sources = tuple(sources)
        self._figures = tuple(figures)

    def add(
        self, step: int, rate: float, loss: torch.Tensor, norm: torch.Tensor, batch: StepBatch
    ) -> None:
        """Appends a finished step without waiting for the device; `loss` as in Loss.sums."""
        if self._first_step is None:
            self._first_step = step
        counts = replace(batch, micro_batches=[])  # do not hold the tensors until the report
        self._pending.append(_PendingRecord(step, rate, loss, norm, counts))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes evaluation and saving from speed and ETA, which are those of training alone."""
        began = time.monotonic()
        yield
        pause = time.monotonic() - began
        self._last += pause
        self._paused += pause

    @property
    def seconds(self) -> float:
        """Training time so far, including earlier sessions of the run."""
        return self._before + time.monotonic() - self._started

    def flush(self) -> list[dict[str, Any]]:
        """Records of the steps since the last flush, the same on every rank."""
        if not self._pending:
            return []
        losses = torch.stack([p.loss.float().flatten() for p in self._pending]).cpu()
        norms = torch.stack([p.norm.float() for p in self._pending]).cpu()
        dist.all_reduce(losses, group=self._group)
        now = time.monotonic()
        speed = sum(p.batch.tokens for p in self._pending) / max(now - self._last, 1e-9)
        self._last = now
        steps = self._pending[-1].step - (self._first_step or 0) + 1
        per_step = (now - self._started - self._paused) / steps
        memory = device_memory(self._device, self._group)
        work = self._work
        mfu = speed * work.flops_per_token / work.peak if work.peak else None
        rows = zip(self._pending, losses.tolist(), norms.tolist(), strict=True)
        records = []
        for entry, sums, norm in rows:
            batch = entry.batch
            record: dict[str, Any] = {
                "kind": "train",
                "step": entry.step + 1,
                "loss": sums[0] / max(1, batch.supervised),
                "learning_rate": entry.rate,
                "grad_norm": norm,
                "sequences": batch.sequences,
                "tokens": batch.tokens,
                "supervised_tokens": batch.supervised,
                "epoch": round(batch.epoch, 4),
                "tokens_per_second": round(speed, 1),
                "mfu": mfu,
                "memory_bytes": memory_now(self._device),
                "elapsed_seconds": round(self.seconds, 3),
                "eta_seconds": round(per_step * (self.total - entry.step - 1), 1),
            }
            records.append(record | memory | self._figures_of(sums, batch))
        self._pending = []
        return records

    def _figures_of(self, sums: list[float], batch: StepBatch) -> dict[str, Any]:
        """The objective's figures, then the loss by source."""
        figures: dict[str, Any] = {}
        for name, value in zip(self._figures, sums[1:], strict=False):
            figures[name] = value / max(1, batch.supervised)
        first = 1 + len(self._figures)
        return figures | figures_by_source(self._sources, sums[first:], batch.by_source)


def figures_by_source(
    names: Sequence[str], sums: Sequence[float], counts: Sequence[int]
) -> dict[str, Any]:
    """Loss and trained tokens of each source that has any; nothing with a single source."""
    if len(names) < 2:
        return {}
    losses: dict[str, float] = {}
    supervised: dict[str, int] = {}
    for name, total, count in zip(names, sums, counts, strict=True):
        if count:
            losses[name] = total / count
            supervised[name] = count
    return {"losses": losses, "supervised_by_source": supervised}


def memory_now(device: torch.device) -> int:
    """Peak device memory on a GPU; resident memory of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def not_finite(records: list[dict[str, Any]], steps_skipped: bool = False) -> str | None:
    """Describes the first NaN or infinite loss or gradient, which would ruin the weights.

    Where fp16's loss scaling skips the steps whose gradient overflowed, only the loss counts.
    """
    for record in records:
        loss = record["loss"]
        norm = record["grad_norm"]
        if not math.isfinite(loss):
            problem = f"the loss became {loss} at step {record['step']} (gradient norm {norm:.3g})"
        elif not math.isfinite(norm) and not steps_skipped:
            problem = f"the gradient norm became {norm} at step {record['step']} (loss {loss:.4g})"
        else:
            continue
        precision = ", or use precision: bf16 or fp32" if steps_skipped else ""
        return (
            f"{problem}\n  → lower train.learning_rate, raise train.warmup{precision}; "
            "or have it go back and leave those data out (guard.nan: back)"
        )
    return None
