"""A run's prediction, stored with it, and its comparison with measurements; light, as every run reads it at its end."""

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
    """Prediction and measurement of a finished run on a GPU, in full steps; None if either is missing."""
    prediction = read_prediction(output)
    steps = [record for record in records if record["kind"] == "train"]
    seconds = [
        (b["elapsed_seconds"] - a["elapsed_seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(steps)
        if b["elapsed_seconds"] > a["elapsed_seconds"] and b["step"] > a["step"]
        and b.get("sequences", batch_size) == batch_size
    ]  # fmt: skip
    if prediction is None or prediction["kind"] == "cpu" or not seconds:
        return None  # a CPU's process holds more than its tensors
    return compare(output, label, max(record["memory_bytes"] for record in steps), median(seconds))


def read_prediction(output: Path) -> dict[str, Any] | None:
    """The stored prediction of a run; None if there is none."""
    try:
        return dict(json.loads((output / FILE).read_text()))
    except (OSError, ValueError):
        return None


def compare(output: Path, label: str, peak: float, seconds: float) -> str | None:
    """Compares the measurements of a finished run with its prediction, stores both, and returns a message."""
    prediction = read_prediction(output)
    if prediction is None or peak <= 0 or seconds <= 0:
        return None
    add(Record(prediction["device"], label, prediction["peak"], peak, prediction["step_seconds"], seconds))
    prediction |= {"measured_bytes": peak, "measured_seconds": seconds}
    (output / FILE).write_text(json.dumps(prediction, indent=1))
    memory_error = prediction["foreseen_bytes"] / peak - 1
    time_error = prediction["foreseen_seconds"] / seconds - 1
    return (
        f"memory {human(peak)}, foreseen {human(prediction['foreseen_bytes'])} ({memory_error:+.1%}); "
        f"step {seconds:.3g} s, foreseen {prediction['foreseen_seconds']:.3g} s ({time_error:+.0%})"
    )


def explain_shortage(output: Path, state_bytes: dict[str, int], peak: int) -> str | None:
    """After an out-of-memory error: which part was larger than predicted."""
    prediction = read_prediction(output)
    if prediction is None:
        return None
    states = ("parameters", "optimizer", "gradients", "frozen")
    predicted = {name: prediction["memory"].get(name, 0) for name in prediction["memory"]}
    states_predicted = sum(size for name, size in predicted.items() if name in (*states, "gathered", "quantised base"))
    states_measured = sum(state_bytes.values())
    rest_measured = peak - states_measured
    rest_predicted = sum(predicted.values()) - states_predicted
    total, limit = human(prediction["foreseen_bytes"]), human(prediction["limit"])
    lines = [f"foreseen were {total} of {limit}; {human(peak)} were in use"]
    lines.append(f"states: {human(states_measured)}, foreseen {human(states_predicted)}")
    lines.append(f"activations, buffers and the rest: {human(rest_measured)}, foreseen {human(rest_predicted)}")
    return "\n    ".join(lines)
