"""Learning rate as a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math

from shardwise.config.schema import Train


def learning_rate(train: Train, step: int, total: int) -> float:
    """The rate for step 0 … total-1: linear warm-up, then the schedule down to `final_learning_rate` of the peak."""
    peak, floor = train.learning_rate, train.final_learning_rate
    warmup = min(train.warmup.steps(total), total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if train.schedule == "constant":
        return peak
    if train.schedule == "wsd":
        decay = max(1, min(train.decay.steps(total), total - warmup))
        done = (step - (total - decay) + 1) / decay
        return peak if done <= 0 else peak * (1 - (1 - floor) * done)
    done = (step - warmup) / max(1, total - warmup)
    shape = 1 - done if train.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (floor + (1 - floor) * shape)
