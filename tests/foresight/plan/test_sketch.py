"""Few layers, scaled, against all of them: memory, work and what is sent must be those of the whole model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.families import config_of

from shardwise.config.schema import Run
from shardwise.foresight.plan.sketch import sketch, sketch_depths
from shardwise.foresight.rehearse.step import Rehearsal, rehearse
from shardwise.foresight.rehearse.subprocess import run_isolated
from shardwise.foresight.rehearse.tally import Tally, tally_of
from shardwise.nn.models.source import ModelSource, config_from

LAYERS = 7


def a_run(ranks: int, **settings: Any) -> Run:
    values: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
        "data": {"train": "none", "sequence_length": 64}, "objective": "causal", "precision": "bf16",
        "device": "cuda", "ranks": ranks, "backend": "nccl",
        "train": {"batch_size": 4 * ranks, "micro_batch_size": 2, "steps": 1}, "parallel": {"zero": 3},
    }  # fmt: skip
    return Run.model_validate(values | settings)


def a_source(family: str = "llama") -> ModelSource:
    config = config_from(config_of(family) | {"num_hidden_layers": LAYERS})
    return ModelSource(family, config, None, "none")


def whole(source: ModelSource, run: Run, ranks: int) -> Tally:
    def one() -> Tally:
        found: Rehearsal = rehearse(source, run, 0, ranks, micro_batches=2)
        return tally_of(found, LAYERS)

    return run_isolated(one)


def flops(counts: dict[Any, float]) -> float:
    return sum(work.flops * count for work, count in counts.items())


def by_kind(wire: dict[Any, float]) -> Counter[str]:
    found: Counter[str] = Counter()
    for (phase, kind, ranks, size), count in wire.items():
        found[f"{phase} {kind} {len(ranks)}"] += round(size * count)
    return found


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"parallel": {"zero": 2}}),
        (4, {"recompute": "full"}),
        (4, {"parallel": {"zero": 1}}),
        (4, {"parallel": {"zero": 2, "tensor": 2}}),
    ],
    ids=["one rank", "ZeRO-3 recomputed", "ZeRO-1", "tensor"],
)
def test_few_layers_tell_of_all(ranks: int, settings: dict[str, Any]) -> None:
    source, run = a_source(), a_run(ranks, **settings)
    real, scaled = whole(source, run, ranks), sketch(source, run, ranks).at()
    assert scaled.peak == pytest.approx(real.peak, rel=0.02)
    assert flops(scaled.work) == pytest.approx(flops(real.work), rel=1e-9)
    assert flops(scaled.work_once) == pytest.approx(flops(real.work_once), rel=1e-9)
    assert scaled.trained == pytest.approx(real.trained)
    assert sum(scaled.held.values()) == pytest.approx(sum(real.held.values()), rel=0.01)
    for mine, other in ((scaled.wire, real.wire), (scaled.wire_once, real.wire_once)):
        assert by_kind(mine) == pytest.approx(by_kind(other), rel=1e-6)


def test_what_happens_once_a_step_is_told_apart() -> None:
    source = a_source()
    first = sketch(source, a_run(4, parallel={"zero": 1}), 4).at()
    third = sketch(source, a_run(4), 4).at()
    assert by_kind(first.wire_once)["forward all_gather 4"] > 0
    assert by_kind(first.wire).get("forward all_gather 4", 0) == 0
    assert by_kind(third.wire)["forward all_gather 4"] > 0


def test_models_of_few_or_uneven_layers_are_rehearsed_whole() -> None:
    config = config_from(config_of("llama") | {"num_hidden_layers": 3})
    assert sketch_depths(config) == ((3,), 3)
    config.num_hidden_layers = 32
    assert sketch_depths(config) == ((2, 3), 32)
    other = config_from(config_of("gemma2") | {"num_hidden_layers": 26})  # every other layer has a window
    assert sketch_depths(other) == ((2, 4), 26)
