"""Collects each step's figures on the device and turns them into records when it is time to report.

Reading a number from the device waits for it; so the step only appends tensors, and `flush` reads them all at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from shardwise.observe.memory import device_memory


@dataclass(frozen=True)
class _Pending:
    step: int
    rate: float
    loss: torch.Tensor
    norm: torch.Tensor
    supervised: int
    tokens: int
    epoch: float
    sequences: int
    by_source: tuple[int, ...]


class Meter:
    """Per-step loss, norm and speed, reduced over ranks at report time."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        total: int,
        seconds: float,
        flops_per_token: float,
        peak: float | None,
        sources: Sequence[str] = (),
        figures: Sequence[str] = (),
    ) -> None:
        self._group, self._device, self.total = group, device, total
        self._pending: list[_Pending] = []
        self._started, self._before = time.monotonic(), seconds
        self._last = self._started
        self._away = 0.0
        self._first_step: int | None = None
        self._flops_per_token, self._peak = flops_per_token, peak
        self._sources, self._figures = tuple(sources), tuple(figures)

    def add(
        self, step: int, rate: float, loss: torch.Tensor, norm: torch.Tensor, batch: Any
    ) -> None:
        """Notes a finished step, its loss as the objective sums it (Loss.sums); no waiting."""
        self._first_step = step if self._first_step is None else self._first_step
        self._pending.append(
            _Pending(
                step,
                rate,
                loss,
                norm,
                batch.supervised,
                batch.tokens,
                batch.epoch,
                batch.sequences,
                batch.by_source,
            )
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training (evaluation, saving), so that speed and ETA speak of training alone."""
        began = time.monotonic()
        yield
        away = time.monotonic() - began
        self._last += away
        self._away += away

    @property
    def seconds(self) -> float:
        """Training time so far, earlier sessions of the same run included."""
        return self._before + time.monotonic() - self._started

    def flush(self) -> list[dict[str, Any]]:
        """Records of the steps since the last flush, the same on every rank."""
        if not self._pending:
            return []
        losses = torch.stack([p.loss.float().flatten() for p in self._pending]).cpu()
        norms = torch.stack([p.norm.float() for p in self._pending]).cpu()
        dist.all_reduce(losses, group=self._group)
        now = time.monotonic()
        speed = sum(p.tokens for p in self._pending) / max(now - self._last, 1e-9)
        self._last = now
        per_step = (now - self._started - self._away) / (
            self._pending[-1].step - (self._first_step or 0) + 1
        )
        memory = device_memory(self._device, self._group)
        mfu = speed * self._flops_per_token / self._peak if self._peak else None
        records = []
        for entry, (loss, *parts), norm in zip(
            self._pending, losses.tolist(), norms.tolist(), strict=True
        ):
            records.append(
                {
                    "kind": "train",
                    "step": entry.step + 1,
                    "loss": loss / max(1, entry.supervised),
                    "learning_rate": entry.rate,
                    "grad_norm": norm,
                    "sequences": entry.sequences,
                    "tokens": entry.tokens,
                    "supervised_tokens": entry.supervised,
                    "epoch": round(entry.epoch, 4),
                    "tokens_per_second": round(speed, 1),
                    "mfu": mfu,
                    "memory_bytes": memory_now(self._device),
                    "elapsed_seconds": round(self.seconds, 3),
                    "eta_seconds": round(per_step * (self.total - entry.step - 1), 1),
                }
                | memory
                | {
                    name: value / max(1, entry.supervised)
                    for name, value in zip(self._figures, parts, strict=False)
                }
                | told_by_source(self._sources, parts[len(self._figures) :], entry.by_source)
            )
        self._pending = []
        return records


def told_by_source(
    names: Sequence[str], sums: Sequence[float], counts: Sequence[int]
) -> dict[str, Any]:
    """Loss and learned tokens of each source that has any, for a record; nothing where there is but one source."""
    if len(names) < 2:
        return {}
    there = [(n, s, c) for n, s, c in zip(names, sums, counts, strict=True) if c]
    return {
        "losses": {n: s / c for n, s, c in there},
        "supervised_by_source": {n: c for n, _, c in there},
    }


def memory_now(device: torch.device) -> int:
    """Peak device memory on a GPU; resident memory of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def not_finite(records: list[dict[str, Any]], steps_skipped: bool = False) -> str | None:
    """What to tell of a loss or gradient that is no number, if there is one: it ruins the weights for good.

    Where fp16's loss scaling skips the steps whose gradient overflowed, only the loss counts.
    """
    for record in records:
        loss, norm = record["loss"], record["grad_norm"]
        if math.isfinite(loss) and (math.isfinite(norm) or steps_skipped):
            continue
        what = f"gradient norm became {norm}" if math.isfinite(loss) else f"loss became {loss}"
        other = f"loss {loss:.4g}" if math.isfinite(loss) else f"gradient norm {norm:.3g}"
        wider = ", or use precision: bf16 or fp32" if steps_skipped else ""
        return (
            f"the {what} at step {record['step']} ({other})\n"
            f"  → lower train.learning_rate, raise train.warmup{wider}; or have it go back and leave those data out "
            "(guard.nan: back)"
        )
    return None
