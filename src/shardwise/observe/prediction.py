"""A run's prediction, kept with it, and what came true; light, because every run reads it at its end."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.config.units import human
from shardwise.observe.calibration import Record, add

FILE = "prediction.json"


def beside_prediction(output: Path, label: str, records: list[dict[str, Any]], batch_size: int) -> str | None:
    """What was predicted of a finished run on a GPU and what was measured, in full steps; None where either lacks."""
    made = kept(output)
    steps = [record for record in records if record["kind"] == "train"]
    spent = [
        (b["elapsed_seconds"] - a["elapsed_seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(steps)
        if b["elapsed_seconds"] > a["elapsed_seconds"] and b["step"] > a["step"]
        and b.get("sequences", batch_size) == batch_size
    ]  # fmt: skip
    if made is None or made["kind"] == "cpu" or not spent:
        return None  # a CPU's process holds more than its tensors
    return compare(output, label, max(record["memory_bytes"] for record in steps), median(spent))


def kept(output: Path) -> dict[str, Any] | None:
    """The prediction of a run, if it was made."""
    try:
        return dict(json.loads((output / FILE).read_text()))
    except (OSError, ValueError):
        return None


def compare(output: Path, label: str, peak: float, seconds: float) -> str | None:
    """Puts what a finished run measured beside its prediction, keeps both for the next, and says how far off it was."""
    made = kept(output)
    if made is None or peak <= 0 or seconds <= 0:
        return None
    add(Record(made["device"], label, made["peak"], peak, made["step_seconds"], seconds))
    made |= {"measured_bytes": peak, "measured_seconds": seconds}
    (output / FILE).write_text(json.dumps(made, indent=1))
    size, spent = made["foreseen_bytes"] / peak - 1, made["foreseen_seconds"] / seconds - 1
    return (
        f"memory {human(peak)}, foreseen {human(made['foreseen_bytes'])} ({size:+.1%}); "
        f"step {seconds:.3g} s, foreseen {made['foreseen_seconds']:.3g} s ({spent:+.0%})"
    )


def explain_shortage(output: Path, held: dict[str, int], peak: int) -> str | None:
    """After a device ran out of memory: which part was larger than foreseen."""
    made = kept(output)
    if made is None:
        return None
    states = ("parameters", "optimizer", "gradients", "frozen")
    foreseen = {name: made["memory"].get(name, 0) for name in made["memory"]}
    known = sum(size for name, size in foreseen.items() if name in (*states, "gathered", "quantised base"))
    here = sum(held.values())
    rest, told = peak - here, sum(foreseen.values()) - known
    lines = [f"foreseen were {human(made['foreseen_bytes'])} of {human(made['limit'])}; {human(peak)} were in use"]
    lines.append(f"states: {human(here)}, foreseen {human(known)}")
    lines.append(f"activations, buffers and the rest: {human(rest)}, foreseen {human(told)}")
    return "\n    ".join(lines)
