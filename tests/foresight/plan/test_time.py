"""The time model: its parts, and its error against the runs that were measured on an H200."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from shardwise.config.schedules import ScheduleName
from shardwise.config.schema import Parallel
from shardwise.core.hardware.specs import cluster_of
from shardwise.foresight.plan.estimate import idle_seconds, in_flight
from shardwise.foresight.plan.time import kernel
from shardwise.foresight.plan.timeline import passes
from shardwise.foresight.rehearse.tracker import OperatorWork
from shardwise.parallel.pipeline.schedule import schedule_of

H200 = cluster_of("h200", 1, 1).device


def product(rows: int, inner: int, columns: int) -> OperatorWork:
    size = 2 * (rows * inner + inner * columns + rows * columns)
    return OperatorWork("forward", "mm", 2 * rows * inner * columns, size, "bfloat16", (rows, inner, columns))


def test_large_products_run_near_the_peak_and_others_below() -> None:
    def rate(work: OperatorWork) -> float:
        return work.flops / kernel(work, H200)

    large, short, odd = product(8192, 8192, 8192), product(8192, 64, 8192), product(8192, 8192, 8191)
    assert 0.7 * H200.peak["bf16"] < rate(large) < 0.9 * H200.peak["bf16"]
    assert rate(short) < 0.6 * rate(large)
    assert rate(odd) < 0.5 * rate(large)


def test_traffic_and_launches_bound_small_operators() -> None:
    copied = OperatorWork("forward", "copy_", 0, 10**9, "bfloat16")
    assert 10**9 / kernel(copied, H200) == pytest.approx(H200.bandwidth, rel=0.3)
    assert kernel(OperatorWork("forward", "add", 0, 8, "float32"), H200) == H200.launch
    assert kernel(copied, H200, compiled=True) == kernel(copied, H200)  # FSDP's copies are not joined
    joined = replace(copied, operator="mul")
    assert kernel(joined, H200, compiled=True) < 0.2 * kernel(joined, H200)


def test_eight_bits_are_faster_for_large_products_alone() -> None:
    assert kernel(product(8192, 8192, 8192), H200, fp8=True) < 0.8 * kernel(product(8192, 8192, 8192), H200)
    small = product(8192, 64, 8192)
    assert kernel(small, H200, fp8=True) == kernel(small, H200)


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_every_pipeline_schedule_has_memory_idle_time_and_a_picture(name: ScheduleName) -> None:
    run: Any = SimpleNamespace(parallel=Parallel(pipeline=4, pipeline_schedule=name))
    assert 1 <= in_flight(run, 8) <= 8
    assert 0 < idle_seconds(run, 8, 1.0) <= 24
    boxes = passes(schedule_of(run.parallel), 4, 8, 1.0, 2.0)
    assert sum(box.end - box.begin for box in boxes) == pytest.approx(4 * 8 * 3.0)


def test_an_unknown_pipeline_schedule_is_an_error() -> None:
    parallel: Any = SimpleNamespace(pipeline=4, pipeline_schedule="new", virtual_stages=None, chunks_per_rank=1)
    run: Any = SimpleNamespace(parallel=parallel)
    for ask in (lambda: in_flight(run, 8), lambda: idle_seconds(run, 8, 1.0)):
        with pytest.raises(AssertionError):
            ask()
