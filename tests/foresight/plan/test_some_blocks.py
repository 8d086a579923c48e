"""Recomputation of some blocks: foreseen as it is, as few as fit, and the same training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.families import config_of
from support.tiny import LLAMA, tiny_run, tokenizer_folder

from shardwise.config.schema import Run
from shardwise.core.hardware.specs import cluster_of
from shardwise.foresight.plan.blocks import fewest_recomputed
from shardwise.foresight.plan.estimate import estimate
from shardwise.foresight.plan.remedies import remedies
from shardwise.foresight.plan.sketch import sketch
from shardwise.foresight.rehearse.step import rehearse
from shardwise.foresight.rehearse.tally import tally_of
from shardwise.launch.trainer import Trainer
from shardwise.nn.models.source import ModelSource, config_from

CONFIG = LLAMA | {"num_hidden_layers": 10, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8,
                  "num_key_value_heads": 4}  # fmt: skip
SOURCE = ModelSource("m", config_from(dict(CONFIG)), None, "none", task="causal")


def a_run(**changes: Any) -> Run:
    return Run.model_validate({
        "model": {"config": CONFIG, "tokenizer": "none"}, "data": {"train": "x", "sequence_length": 16384},
        "objective": "causal", "precision": "bf16", "device": "cuda", "ranks": 1, "backend": "gloo",
        "train": {"batch_size": 1, "micro_batch_size": 1}, "recompute": "full", **changes,
    })  # fmt: skip


@pytest.mark.parametrize("blocks", [1, 4, 9])
def test_a_sketch_foresees_the_mix(blocks: int) -> None:
    run = a_run(recompute_blocks=blocks)
    whole, few = tally_of(rehearse(SOURCE, run, 0, 1), 10), sketch(SOURCE, run, 1).at()
    flops = [sum(work.flops * times for work, times in tally.work.items()) for tally in (whole, few)]
    print(f"\n{blocks}: {whole.peak:,.0f} {few.peak:,.0f}, {flops[0]:.4g} {flops[1]:.4g}")
    assert few.peak == pytest.approx(whole.peak, rel=0.01) and flops[1] == pytest.approx(flops[0], rel=1e-3)


def on(gib: float, **changes: Any) -> Any:
    cluster = cluster_of("h200", 1, 1)
    cluster = replace(cluster, device=replace(cluster.device, memory=gib * 2**30))
    return estimate(SOURCE, a_run(**changes), cluster)


def test_as_few_as_fit() -> None:
    every, none = on(100), on(100, recompute="none")
    assert every.peak < 0.6 * none.peak
    middle = (every.peak + none.peak) / 2 / 2**30 * 1.03
    found, blocks = fewest_recomputed(SOURCE, on(middle))
    assert blocks is not None and 3 <= blocks <= 7 and found.fits
    assert not on(middle, recompute_blocks=blocks - 1).fits
    assert every.time.seconds > found.time.seconds > none.time.seconds
    assert found.model_flops == pytest.approx(none.model_flops, rel=2e-2)
    assert fewest_recomputed(SOURCE, on(every.peak / 2**30 * 1.031))[1] in (None, 9)


def test_a_remedy_names_how_many() -> None:
    every, none = on(100), on(100, recompute="none")
    before = on((every.peak + none.peak) / 2 / 2**30 * 1.03, recompute="none")
    found = [one for one in remedies(SOURCE, before.run, before.cluster, before) if "recompute" in one.settings]
    (one,) = [one for one in found if one.settings.keys() == {"recompute", "recompute_blocks"}]
    assert 3 <= one.settings["recompute_blocks"] <= 7 and one.estimate.fits
    assert "recompute=full advanced.memory.recompute_blocks=" in one.describe(before)
    assert one.estimate.time.seconds < every.time.seconds


def test_lightly_where_that_is_enough() -> None:
    """Compiled blocks compute activation functions and norms again: much less is kept for hardly more time."""
    none, light, full = (on(100, compile=True, recompute=kind) for kind in ("none", "light", "full"))
    print(f"\n{[(one.peak, one.time.seconds) for one in (none, light, full)]}")
    assert full.peak < light.peak < 0.85 * none.peak
    assert none.time.seconds < light.time.seconds < 1.04 * none.time.seconds < full.time.seconds
    room = (light.peak + 0.2 * (none.peak - light.peak)) / 2**30 * 1.03
    found, blocks = fewest_recomputed(SOURCE, on(room, compile=True))
    assert found.run.recompute == "light" and blocks is None and found.fits


def test_training_is_the_same(tmp_path: Path) -> None:
    model = {"config": config_of("llama"), "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}

    def losses(name: str, **changes: Any) -> list[float]:
        rows = Trainer(tiny_run(tmp_path / name, model, precision="fp32", train__steps=3, **changes)).fit().metrics
        return [row["loss"] for row in rows if row["kind"] == "train"]

    plain = losses("plain")
    assert losses("some", recompute="full", recompute_blocks=1) == plain
    host = {"recompute": "full", "recompute_blocks": 1, "offload": {"activations": "cpu"}}
    assert losses("host", **host) == plain
