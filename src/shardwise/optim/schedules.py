"""Learning rate as a pure function of the step, so that resuming needs no state.

[Note: DeepSpeed's schedules] They set the rate after each update for the next one, and count from -1: update 0 runs
at the initial value and update u at the formula for u - 1. Warm-ups therefore spend two updates at their least rate.
This is reproduced, so that a run ported from DeepSpeed gets the same rates. One thing differs: an update that fp16
skips for an overflow counts as a step here, whereas DeepSpeed does not advance its schedule.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.config.schema import (
    LRRangeTestSchedule,
    OneCycleSchedule,
    Train,
    Warmup,
    WarmupCosineLRSchedule,
    WarmupDecayLRSchedule,
)


def learning_rate(train: Train, step: int, total: int) -> float:
    """Returns the rate for step 0 … total-1: linear warm-up, then the schedule down to `min_lr_ratio` of it."""
    schedule = train.schedule
    peak = train.learning_rate
    floor = train.min_lr_ratio
    if not isinstance(schedule, str):
        return _deepspeed_rate(schedule, peak, step, total)
    warmup: int = min(train.warmup.steps(total), total)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    start = warmup
    if schedule == "wsd":
        start = max(warmup, total - train.decay.steps(total))
    progress = max(0, step - start) / max(1, total - start)
    shape = _cosine(progress) if schedule == "cosine" else 1 - progress
    return peak * (floor + (1 - floor) * shape)


def _cosine(progress: float) -> float:
    """Half a cosine wave from 1 to 0."""
    return (1 + math.cos(math.pi * progress)) / 2


def momentum(train: Train, step: int) -> float | None:
    """Returns the first beta for a step, if the schedule sets it (OneCycle)."""
    cycle = train.schedule
    if not isinstance(cycle, OneCycleSchedule) or not cycle.cycle_momentum:
        return None
    low = cycle.cycle_min_mom
    high = cycle.cycle_max_mom
    if step == 0:
        return low  # DeepSpeed starts at the lowest, though the cycle begins at the highest
    after = step - 1 - _cycle_length(cycle)
    if after < 0:
        return high - (high - low) * _cycle_share(cycle, step)
    return high * (1 + cycle.decay_mom_rate * _decay_units(cycle, after + 1))


def set_rates(optimizer: torch.optim.Optimizer, train: Train, step: int, total: int) -> float:
    """Sets the step's rate (and momentum, if the schedule sets it) in the optimizer; returns the rate."""
    rate = learning_rate(train, step, total)
    first = momentum(train, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
        if first is not None and "betas" in group:
            group["betas"] = (first, group["betas"][1])
    return rate


def _deepspeed_rate(schedule: Any, peak: float, step: int, total: int) -> float:
    """See [Note: DeepSpeed's schedules]; `last` is its count of the last batch."""
    last = step - 1
    if isinstance(schedule, LRRangeTestSchedule):
        units = step / schedule.lr_range_test_step_size
        if schedule.lr_range_test_staircase:
            units = math.floor(units)
        return peak * (1 + schedule.lr_range_test_step_rate * units)
    if isinstance(schedule, OneCycleSchedule):
        return _one_cycle(schedule, peak, step)
    warmup: int = max(2, schedule.warmup_num_steps.steps(total))
    end: int = getattr(schedule, "total_num_steps", None) or total
    if isinstance(schedule, WarmupCosineLRSchedule):
        return peak * _cosine_ratio(schedule, last, warmup, end)
    assert isinstance(schedule, Warmup)
    low = schedule.warmup_min_lr
    if last < 0:
        return low
    if last < warmup:
        return low + (peak - low) * _warmup_share(schedule.warmup_type, last, warmup)
    if isinstance(schedule, WarmupDecayLRSchedule):
        return low + (peak - low) * max(0.0, (end - last) / max(1.0, end - warmup))
    return low + (peak - low)


def _warmup_share(shape: str, last: int, warmup: int) -> float:
    """Progress of a logarithmic or linear warm-up, from 0 to 1."""
    if shape == "log":
        return math.log(last + 1) / math.log(warmup)
    return last / warmup


def _cosine_ratio(schedule: WarmupCosineLRSchedule, last: int, warmup: int, end: int) -> float:
    if last < 0:
        return 0.0
    if last < warmup:
        least = schedule.warmup_min_ratio
        return least + (1 - least) * _warmup_share(schedule.warmup_type, last, warmup)
    progress = min(1.0, (last - warmup + 1) / max(1, end - warmup))
    least = schedule.cos_min_ratio
    return max(0.0, least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2)


def _cycle_length(cycle: OneCycleSchedule) -> int:
    first = cycle.cycle_first_step_size
    second = cycle.cycle_second_step_size
    return first + (first if second is None else second)


def _decay_units(cycle: OneCycleSchedule, steps: int) -> float:
    """Number of decay periods in the steps after the cycle; 0 without decay."""
    return steps / cycle.decay_step_size if cycle.decay_step_size else 0.0


def _cycle_share(cycle: OneCycleSchedule, step: int) -> float:
    """The cycle's height, from 0 to 1; in stairs if configured."""
    position = step % _cycle_length(cycle)
    part = cycle.cycle_first_step_size  # steps of the rise
    stairs = cycle.cycle_first_stair_count
    if position > part:
        position = _cycle_length(cycle) - position
        part = _cycle_length(cycle) - part  # steps of the fall
        if cycle.cycle_second_stair_count is not None:
            stairs = cycle.cycle_second_stair_count
    if not stairs:
        return position / part
    return math.floor(position * stairs / part) / stairs


def _one_cycle(cycle: OneCycleSchedule, peak: float, step: int) -> float:
    low = cycle.cycle_min_lr
    length = _cycle_length(cycle)
    if step - 1 < length:
        return low + (peak - low) * _cycle_share(cycle, step)
    return low / (1 + cycle.decay_lr_rate * _decay_units(cycle, step - length))
