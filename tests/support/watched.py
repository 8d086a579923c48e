"""Output folders as runs leave them, written in a moment."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil


def train_record(step: int, **changes: Any) -> dict[str, Any]:
    """A training record as the meter makes them."""
    loss = 2 + 4 * math.exp(-step / 50)
    return {
        "kind": "train", "step": step, "loss": loss, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens": 1000,
        "supervised_tokens": 900, "epoch": step / 100, "tokens_per_second": 5000.0, "mfu": None,
        "memory_bytes": 1 << 30, "elapsed_seconds": step * 0.2, "eta_seconds": 1.0,
        "losses": {"web": loss - 0.5, "code": loss + 0.5},
    } | changes  # fmt: skip


def eval_record(step: int) -> dict[str, Any]:
    """An evaluation's."""
    return {"kind": "eval", "step": step, "loss": 2.5, "perplexity": 12.2, "losses": {"web": 2.0}, "time": time.time()}


def write_lines(file: Path, records: list[dict[str, Any]], mode: str = "w") -> None:
    """Records as lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open(mode) as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


def make_run(
    folder: Path, steps: int = 20, ranks: int = 2, pid: int | None = None, settings: dict[str, Any] | None = None
) -> Path:
    """A run that goes on (this process is all its ranks), with an evaluation each 10 steps and a checkpoint."""
    records = [r for s in range(1, steps + 1) for r in [train_record(s), *([eval_record(s)] if s % 10 == 0 else [])]]
    write_lines(folder / "metrics.jsonl", records)
    run = {"train": {"steps": 100, "learning_rate": 1e-3}, "model": {"name": "tiny"}} | (settings or {})
    (folder / "job.json").write_text(json.dumps({"run": run}))
    logs = folder / "logs"
    for rank in range(ranks):
        start = {
            "kind": "start", "rank": rank, "size": ranks, "device": "cpu", "host": socket.gethostname(),
            "pid": pid or os.getpid(), "began": psutil.Process().create_time(), "time": time.time(),
        }  # fmt: skip
        own = {"kind": "rank", "step": steps, "seconds": 0.2, "waiting": 0.1, "cpu_seconds": 0.1,
               "memory_bytes": 1 << 30, "rss_bytes": 1 << 30, "time": time.time()}  # fmt: skip
        write_lines(logs / f"rank-{rank}.metrics.jsonl", [start, own])
        (logs / f"rank-{rank}.status").write_text(f"{steps}\tcomputing".ljust(80))
        (logs / f"rank-{rank}.log").write_text(f"rank {rank} says hello\n")
    host = {"kind": "host", "host": "here", "cpu_percent": 50.0, "ram_used_bytes": 1 << 30, "ram_total_bytes": 4 << 30,
            "disk_free_bytes": 9 << 30, "time": time.time()}  # fmt: skip
    write_lines(logs / "rank-0.host.jsonl", [host])
    checkpoint = folder / f"checkpoints/step-{steps:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state").write_bytes(b"x" * 1000)
    (checkpoint / "trainer.json").write_text(json.dumps({"best_step": steps, "best_value": 2.5, "best_metric": "loss"}))
    return folder
