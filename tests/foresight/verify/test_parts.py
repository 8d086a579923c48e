"""The parts of a proof: the smallest world, the small model, and how far apart is the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import config_of
from transformers import AutoConfig

from shardwise.config.schema import Run
from shardwise.foresight.verify.claims import plan_claims, small_world
from shardwise.foresight.verify.compare import (
    EXACT,
    ParityDifference,
    Reference,
    gradient_difference,
    rounding,
    update_difference,
    worst_difference,
    write_reference,
)
from shardwise.foresight.verify.shrunk_model import ResourceBudget, fewer_layers, kinds_within, make_model, tiny_config
from shardwise.nn.models.source import ModelSource


def described(**more: Any) -> Run:
    return Run.model_validate({"model": "m", "data": {"train": "x.jsonl"}, **more})


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        ({"ranks": 1}, 1),
        ({}, 2),
        ({"ranks": 64}, 2),
        ({"ranks": 64, "parallel": {"dp_shard_size": 8}}, 4),
        ({"ranks": 8, "parallel": {"tensor": 8}}, 2),
        ({"ranks": 64, "parallel": {"tensor": 8, "pipeline": 4}}, 8),
        ({"ranks": 32, "parallel": {"tensor": 8, "pipeline": 4}}, 4),
        ({"ranks": 16, "parallel": {"context": 8, "expert": 4}}, 4),
        ({"ranks": 9, "parallel": {"tensor": 9}}, 3),  # nine heads are not divided by two
        ({"ranks": 12, "parallel": {"tensor": 3, "expert": 4}}, 6),
        ({"ranks": 12, "parallel": {"expert": 3}}, 3),
        ({"ranks": 16, "parallel": {"zero": 3, "hpz_size": 8}}, 4),
    ],
)
def test_the_smallest_world_has_every_axis(run: dict[str, Any], ranks: int) -> None:
    assert small_world(described(**run)).ranks == ranks


def test_claims_change_one_thing_at_a_time() -> None:
    run = described(ranks=16, recompute="full", parallel={"zero": 1, "tensor": 4, "pipeline": 2})
    plan = plan_claims(run, packing=True, precision="fp32")
    names = [claim.name for claim in plan.claims]
    assert names == [
        "model and loss", "packing", "accumulation", "recompute", "ZeRO-1 on 2 ranks", "tensor 2", "pipeline 2 (1f1b)",
        "tensor 2 × pipeline 2 × ZeRO-1 + recompute on 8 ranks",
    ]  # fmt: skip
    assert plan.claims[-1].ranks == 8 and plan.notes == [
        "smallest world with every axis of the run: tensor 4 → 2, 16 ranks → 8"
    ]
    for claim in plan.claims:
        assert set(claim.rests_on) <= set(names[: names.index(claim.name)])
        data = claim.ranks // (claim.settings.get("parallel.tensor", 1) * claim.settings.get("parallel.pipeline", 1))
        assert plan.rows % (claim.settings["train.micro_batch_size"] * data) == 0


@pytest.mark.parametrize(
    "more", [{"prefetch": 2, "reduce_dtype": "bf16"}, {"bucket": 100_000}, {"quantize_weights": True}]
)
def test_no_two_claims_have_one_name(more: dict[str, Any]) -> None:
    names = [c.name for c in plan_claims(described(ranks=2, parallel={"zero": 3, **more}), True, "fp32").claims]
    assert len(set(names)) == len(names) and names[-1] == "all settings of ZeRO-3 on 2 ranks"


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, {"context": 2}), (9, {"tensor": 9}), (6, {"expert": 3}), (12, {"tensor": 3, "expert": 3}), (1, {}),
     (24, {"context": 3, "dp_shard_size": 4}),
     (64, {"zero": 3, "dp_shard_size": 16, "hpz_size": 4}), ("auto", {"pipeline": 3})],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 8])
def test_every_claim_is_a_run_that_divides(ranks: int | str, parallel: dict[str, Any], batch: int) -> None:
    data = 1 if ranks == "auto" else int(ranks)
    run = described(ranks=ranks, parallel=parallel, train={"batch_size": batch * data, "micro_batch_size": 1})
    plan = plan_claims(run, packing=True, precision="fp32")
    for claim in plan.claims:
        inner = [claim.settings.get(f"parallel.{name}", 1) for name in ("tensor", "context", "pipeline")]
        spread, rest = divmod(claim.ranks, math.prod(inner))
        assert not rest and plan.rows % (claim.settings["train.micro_batch_size"] * spread) == 0, claim
        assert (claim.ranks // inner[2]) % claim.settings.get("parallel.expert", 1) == 0
        assert (spread * inner[1]) % claim.settings.get("parallel.dp_shard_size", 1) == 0


def test_fewer_layers_of_each_kind() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=12, attention_dropout=0.1)
    assert kinds_within(config) == 6  # the first global layer
    small = fewer_layers(config, 6)
    assert small.num_hidden_layers == 6 and small.layer_types == config.layer_types[:6]
    assert small.hidden_size == config.hidden_size and small.attention_dropout == 0.0
    both = fewer_layers(AutoConfig.for_model("t5", num_layers=6, num_decoder_layers=4), 2)
    assert (both.num_layers, both.num_decoder_layers, both.dropout_rate) == (2, 2, 0.0)


def test_widths_stay_where_there_is_room(tmp_path: Path) -> None:
    values = config_of("llama") | {"num_hidden_layers": 6}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    source = ModelSource("a llama", config, None, "none")
    room = ResourceBudget("cpu", 1 << 32, 2, 1000)
    real = make_model(source, tmp_path / "real", room, None, full=False, stages=1)
    deep = make_model(source, tmp_path / "deep", room, None, full=False, stages=4)
    tiny = make_model(source, tmp_path / "tiny", replace(room, memory=1000), None, full=False, stages=1)
    whole = make_model(source, tmp_path / "whole", room, None, full=True, stages=1)
    assert (
        "2 layers, real widths" in real.description
        and "4 layers" in deep.description
        and "a tiny llama" in tiny.description
    )
    assert real.parameters < deep.parameters < whole.parameters
    kept = tiny_config(config, 2)
    assert kept.vocab_size == config.vocab_size and kept.max_position_embeddings == config.max_position_embeddings
    with pytest.raises(Exception, match="leave --full out"):
        make_model(source, tmp_path / "no", replace(room, memory=1000), None, full=True, stages=1)


def test_gradients_apart() -> None:
    theirs = torch.tensor([1.0, -2.0, 0.5])
    assert gradient_difference(theirs.clone(), theirs, 2.0) == 0
    assert gradient_difference(theirs + 0.02, theirs, 2.0) == pytest.approx(0.01, rel=1e-3)
    assert gradient_difference(None, theirs, 2.0) == gradient_difference(theirs[:2], theirs, 2.0) == float("inf")
    assert gradient_difference(theirs * float("nan"), theirs, 2.0) == float("inf")
    assert gradient_difference(None, torch.zeros(3), 2.0) == 0
    noise = torch.full((3,), 1e-9)
    assert gradient_difference(-noise, noise, 1.0) < EXACT.gradient  # rounding around no gradient at all


def test_updates_apart() -> None:
    """A sign of rounding is no difference; a tensor that stood still is."""
    before, gradient = torch.zeros(4), torch.tensor([1.0, -1.0, 1e-7, 0.5])
    theirs = before - 1e-3 * gradient.sign()
    ours = theirs.clone()
    ours[2] = 1e-3
    assert update_difference(ours, theirs, gradient, 1e-3, 1.0) == 0
    assert update_difference(before, theirs, gradient, 1e-3, 1.0) == pytest.approx(1.0)
    one = torch.ones(4)
    assert update_difference(one - 1e-7, one, gradient, 1e-6, 1.0) == 0  # a small rate on large weights


def test_the_worst_rank_counts() -> None:
    good = ParityDifference(1e-7, 1e-7, 1e-6, "a", 1e-7, "a", 1e-7)
    bad = replace(good, gradient=0.5, worst="b", first="b")
    ranks = [{"difference": vars(one), "names": ["a", "b"]} for one in (good, bad)]
    found = worst_difference(ranks, ["a", "b"])
    assert found.rank == 1 and found.trouble(EXACT).startswith("gradients: b is the first that differs")
    assert "on rank 1" in found.trouble(EXACT)
    assert not worst_difference([ranks[0]], ["a", "b"]).trouble(EXACT)
    assert worst_difference([ranks[0]], ["a", "b", "c"]).trouble(EXACT) == "no rank trains c"
    frozen = replace(good, after=0.1)
    assert "after one update" in frozen.trouble(EXACT)
    assert ParityDifference(float("inf"), 0.0, 0.0).trouble(EXACT)


def test_room_for_rounding(tmp_path: Path) -> None:
    single, half = ({"w": torch.tensor([1.0, -2.0]) + shift} for shift in (0.0, 0.01))
    told = {"loss": 2.0, "norm": 3.0, "after": 1.5}
    write_reference(tmp_path / "a.safetensors", single, {}, told)
    write_reference(tmp_path / "b.safetensors", half, {}, {"loss": 2.01, "norm": 3.03, "after": 1.6})
    room = rounding(Reference(tmp_path / "b.safetensors"), Reference(tmp_path / "a.safetensors"))
    assert room.loss == pytest.approx(4 * 0.01) and room.norm == pytest.approx(4 * 0.01)
    assert room.gradient == pytest.approx(4 * 0.005, rel=1e-3) and room.after == pytest.approx(4 * 0.1)
    far = {"w": torch.tensor([5.0, 5.0])}
    write_reference(tmp_path / "c.safetensors", far, {}, told)
    assert rounding(Reference(tmp_path / "c.safetensors"), Reference(tmp_path / "a.safetensors")).gradient == 0.5
