"""The latest metrics of each run in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from shardwise.watch.folder import RunFolder
from shardwise.watch.ranks import rank_rows

STATES = ("starting", "running", "finished", "failed", "stopped", "silent")
TRAIN = {  # name of ours → its key in a training record and what it is
    "step": ("step", "steps done"),
    "loss": ("loss", "training loss of the last step"),
    "cross_entropy": ("cross_entropy", "cross-entropy of the last step, where the loss has more in it"),
    "aux_loss": ("aux_loss", "auxiliary loss of routers of the last step, without its coefficient"),
    "z_loss": ("z_loss", "z-loss of routers of the last step, without its coefficient"),
    "learning_rate": ("learning_rate", "learning rate of the last step"),
    "grad_norm": ("grad_norm", "gradient norm of the last step"),
    "tokens_per_second": ("tokens_per_second", "tokens of all ranks"),
    "mfu": ("mfu", "share of the peak arithmetic that is used"),
    "memory_bytes": ("memory_bytes", "peak memory of the main rank's device, or its process on a CPU"),
    "elapsed_seconds": ("elapsed_seconds", "training time so far"),
    "eta_seconds": ("eta_seconds", "training time left"),
}
RANK = {
    "rank_step": ("step", "step that a rank is at"),
    "rank_step_seconds": ("seconds", "seconds per step of a rank"),
    "rank_waiting_seconds": (
        "waiting",
        "seconds per step that a rank waits for others, where advanced.log.breakdown tells",
    ),
    "rank_memory_bytes": ("memory", "peak memory of a rank's device, or its process on a CPU"),
    "rank_rss_bytes": ("rss", "resident memory of a rank's process"),
}
HOST = {
    "host_cpu_percent": ("cpu_percent", "use of a host's cores"),
    "host_ram_used_bytes": ("ram_used_bytes", "memory in use on a host"),
    "host_disk_free_bytes": ("disk_free_bytes", "room left where the run writes"),
}


def exposition(runs: Iterable[RunFolder]) -> str:
    """Metrics of all runs as one page of text."""
    families: dict[str, tuple[str, list[str]]] = {}

    def put(name: str, help_text: str, value: Any, **labels: Any) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return
        inner = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
        families.setdefault(name, (help_text, []))[1].append(f"shardwise_{name}{{{inner}}} {float(value)!r}")

    for run in runs:
        detail = run.detail()
        for state in STATES:
            put("run_state", "1 for the state that a run is in", int(detail["state"]["word"] == state),
                run=run.name, state=state)  # fmt: skip
        put("steps_total", "steps that the run is to take", detail["total"], run=run.name)
        for name, (key, help_text) in TRAIN.items():
            put(name, help_text, detail["latest"].get(key), run=run.name)
        experts = detail["latest"].get("experts")
        for key in ("worst", "mean") if isinstance(experts, dict) else ():
            help_text = "tokens of the busiest expert over the mean of its layer: the worst layer, or the mean of all"
            put("expert_load", help_text, experts.get(key), run=run.name, of=key)
        put("eval_loss", "loss of the last evaluation", detail["evaluated"].get("loss"), run=run.name)
        for kind, record in (("source_loss", detail["latest"]), ("source_eval_loss", detail["evaluated"])):
            losses = record.get("losses")
            for source, value in (losses if isinstance(losses, dict) else {}).items():
                put(kind, "loss of one source of the data", value, run=run.name, source=source)
        for row in rank_rows(run.path / "logs", run.ranks()):
            for name, (key, help_text) in RANK.items():
                put(name, help_text, row[key], run=run.name, rank=row["rank"])
        for host in detail["hosts"]:
            for name, (key, help_text) in HOST.items():
                put(name, help_text, host.get(key), run=run.name, host=host.get("host"))
    lines = []
    for name, (help_text, values) in families.items():
        lines += [f"# HELP shardwise_{name} {help_text}", f"# TYPE shardwise_{name} gauge", *values]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
