"""Learning rate as a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math

from shardwise.config.schema import Train


def learning_rate(train: Train, step: int, total: int) -> float:
    """The rate for step 0 … total-1: linear warm-up, then the schedule down to `final_learning_rate` of the peak."""
    peak, floor = train.learning_rate, train.final_learning_rate
    warmup: int = min(train.warmup.steps(total), total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if train.schedule == "constant":
        return peak
    start = max(warmup, total - train.decay.steps(total)) if train.schedule == "wsd" else warmup
    done = max(0, step - start) / max(1, total - start)
    shape = (1 + math.cos(math.pi * done)) / 2 if train.schedule == "cosine" else 1 - done
    return peak * (floor + (1 - floor) * shape)
