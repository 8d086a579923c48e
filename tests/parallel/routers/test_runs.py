"""Runs of models with routers through the real loop and command: what is reported, saved, resumed and exported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import cli, routed
from support.judged import preference_file
from support.ranks import run_ranks

COEFFICIENT = routed.COEFFICIENT
STRAIGHT = {"train__steps": 4, "train__schedule": "constant", "checkpoint__every": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("routed-runs")
    for name in routed.CONFIGS:
        routed.model_folder(made / name, name)
    return made


def the_run(folder: Path, name: str, output: str, **changes: Any) -> dict[str, Any]:
    return routed.routed_run(folder, str(folder / name), **changes) | {"output": str(folder / output)}


def test_the_command_trains_the_models_own_loss(folder: Path) -> None:
    """By `shardwise train`, with a coefficient that shows: the first loss is the model's own, and is told in parts."""
    run = the_run(folder, "mixtral", "command", train__steps=2, data__eval="5%", train__eval_every=1)
    code, out, err = cli.train(cli.write_run(folder / "command-file", run))
    assert code == 0, err
    assert "auxiliary loss × 0.5 over each document" in " ".join(out.split())
    records = [json.loads(line) for line in (folder / "command/metrics.jsonl").read_text().splitlines()]
    wanted = run_ranks(routed.definition, 1, run | {"output": str(folder / "command-defined")})[0]
    first, held = (next(r for r in records if r["kind"] == kind) for kind in ("train", "eval"))
    assert first["loss"] == pytest.approx(wanted["losses"][0], abs=5e-6)
    assert first["aux_loss"] == pytest.approx(wanted["aux"][0], abs=5e-6)
    for record in (first, held):
        assert record["loss"] == pytest.approx(record["cross_entropy"] + COEFFICIENT * record["aux_loss"], rel=1e-6)
        assert record["loss"] > record["cross_entropy"] + 0.5
    assert held["perplexity"] == pytest.approx(math.exp(held["cross_entropy"]), rel=1e-6)
    assert sum(map(sum, first["experts"]["tokens"].values())) == first["tokens"] * 2 * 4  # choices × layers, no padding
    config = json.loads((folder / "command/model/config.json").read_text())
    assert config["output_router_logits"] is True and config["router_aux_loss_coef"] == COEFFICIENT
    page = (folder / "command/loss.html").read_text()
    assert "<h2>Cross-entropy</h2>" in page and "<h2>Auxiliary loss of routers</h2>" in page
    # And `shardwise eval` of what was held out is the run's last evaluation.
    code, out, err = cli.command("eval", folder / "command", "--json")
    assert code == 0, err
    figures = json.loads(out)["results"][str(folder / "command")][0]["figures"]
    last = [r for r in records if r["kind"] == "eval"][-1]
    for name in ("loss", "cross_entropy", "aux_loss", "perplexity"):
        assert figures[name]["value"] == pytest.approx(last[name], rel=1e-6), name


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, Any]:
    """Four steps in one go, and two steps that others go on from."""
    runs = {
        "straight": ("fitted", the_run(folder, "deepseek_v3", "straight", **STRAIGHT)),
        "half": ("fitted", the_run(folder, "deepseek_v3", "half", **STRAIGHT | {"train__steps": 2})),
    }
    return run_ranks(routed.several, 1, runs)[0]  # type: ignore[no-any-return]


def test_biases_move_and_are_part_of_the_run(straight: dict[str, Any], folder: Path) -> None:
    whole, half = straight["straight"], straight["half"]
    assert whole["run"]["router"] == {"aux_loss": 0.0, "z_loss": 0.0, "bias_update": 0.001, "balance": "document"}
    assert whole["biases"] and any(not torch.equal(b, half["biases"][n]) for n, b in whole["biases"].items())
    exported = load_file(folder / "straight/model/model.safetensors")
    assert all(torch.equal(exported[name], bias) for name, bias in whole["biases"].items())


WAYS = {"one rank": (1, {}), "ZeRO-3": (2, {"parallel__zero": 3}), "stages": (2, {"parallel__pipeline": 2})}


@pytest.mark.parametrize("way", ["one rank", *(pytest.param(w, marks=pytest.mark.slow) for w in ("ZeRO-3", "stages"))])
def test_resumed_they_are_the_same_bits(straight: dict[str, Any], folder: Path, way: str) -> None:
    ranks, settings = WAYS[way]
    name = f"on-{way.replace(' ', '-')}"
    again = the_run(folder, "deepseek_v3", name, ranks=ranks, **STRAIGHT | settings)
    again["resume"] = str(folder / "half/checkpoints/step-00000002")
    found = run_ranks(routed.fitted, ranks, again)
    biases = {n: b for one in found for n, b in one["biases"].items()}
    assert all(torch.equal(biases[n], b) for n, b in straight["straight"]["biases"].items())
    losses = [
        [r["loss"] for r in x if r["kind"] == "train"][-2:]
        for x in (found[0]["records"], straight["straight"]["records"])
    ]
    if ranks == 1:
        assert losses[0] == losses[1]
    else:
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_exported_in_bf16_the_bias_is_fp32(straight: dict[str, Any], folder: Path) -> None:
    from shardwise.checkpoint.hf import ExportOptions, export_checkpoint

    export_checkpoint(folder / "straight/checkpoints/step-00000004", folder / "bf16", ExportOptions(dtype="bf16"))
    tensors = load_file(folder / "bf16/model.safetensors")
    names = set(straight["straight"]["biases"])
    assert {n for n, t in tensors.items() if t.dtype == torch.float32} == names
    assert all(torch.equal(tensors[n], straight["straight"]["biases"][n]) for n in names)
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "bf16", dtype=torch.bfloat16)
    assert all(b.dtype == torch.float32 for b in routed.biases_of(model).values())


@pytest.fixture(scope="module")
def others(folder: Path) -> dict[str, Any]:
    """Several ways to train, in one start of processes."""
    rows = {"data__packing": False, "train__micro_batch_size": 4}
    pairs = preference_file(folder)
    judged = {"objective": "dpo", "data__train": pairs, "data__sequence_length": 512, "train__micro_batch_size": 4}
    lora = {"method": {"type": "lora", "rank": 4}, "train__steps": 2}
    runs = {
        "micro-batch": ("one_micro_batch", the_run(folder, "mixtral", "m", router__balance="micro_batch", **rows)),
        "document": ("one_micro_batch", the_run(folder, "mixtral", "d", **rows)),
        "dpo": ("judged_batch", the_run(folder, "mixtral", "dpo", **judged)),
        "dpo in rows": ("judged_batch", the_run(folder, "mixtral", "dpo-rows", **judged | {"data__packing": False})),
        "dpo with an adapter": ("judged_batch", the_run(folder, "mixtral", "dpo-lora", **judged | lora)),
        "lora": ("fitted", the_run(folder, "mixtral", "lora", **lora)),
        "lora of biases": ("fitted", the_run(folder, "deepseek_v3", "lora-biases", **lora)),
        "frozen": ("fitted", the_run(folder, "deepseek_v3", "frozen", freeze=["*.gate.*"], train__steps=2)),
        "off": ("fitted", the_run(folder, "mixtral", "off", router__aux_loss=0, train__steps=1)),
    }
    return run_ranks(routed.several, 1, runs, timeout=600)[0]  # type: ignore[no-any-return]


def test_by_micro_batch_it_is_transformers_own_of_the_batch(others: dict[str, Any]) -> None:
    assert others["micro-batch"]["ours"] == pytest.approx(others["micro-batch"]["own"], abs=5e-6)
    assert abs(others["document"]["ours"] - others["document"]["own"]) > 1e-4


@pytest.mark.parametrize("name", ["dpo", "dpo in rows", "dpo with an adapter"])
def test_pairs_get_the_losses_of_the_policys_routers(others: dict[str, Any], name: str) -> None:
    found = others[name]
    assert found["aux_loss"] == pytest.approx(found["aux"], rel=1e-5)
    assert found["total"] == pytest.approx(found["loss_objective"] + COEFFICIENT * found["aux_loss"], rel=1e-6)


def test_adapters_and_frozen_routers(others: dict[str, Any], folder: Path) -> None:
    """Their losses are computed and reported; the first is that of the base, whose biases stay as they are."""
    wanted = run_ranks(routed.definition, 1, the_run(folder, "mixtral", "lora-defined", train__steps=1))[0]
    first = others["lora"]["records"][0]
    assert first["loss"] == pytest.approx(wanted["losses"][0], abs=5e-6) and first["aux_loss"] > 1
    before = routed.biases_of(_loaded(folder / "deepseek_v3"))
    for name in ("lora of biases", "frozen"):
        assert others[name]["run"]["router"]["bias_update"] == 0.0
        assert all(torch.equal(bias, before[n]) for n, bias in others[name]["biases"].items())


def _loaded(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def test_switched_off(others: dict[str, Any]) -> None:
    record = others["off"]["records"][0]
    assert not {"aux_loss", "z_loss", "cross_entropy"} & set(record) and record["loss"] < 6.6


@pytest.mark.parametrize("zero", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_loop_of_ones_own_has_the_models_own_loss(folder: Path, zero: int) -> None:
    (one, aux), (two, _) = (
        run_ranks(routed.own_loop, n, zero if n > 1 else 0, str(folder / "mixtral"))[0] for n in (1, 2)
    )
    assert two == pytest.approx(one, abs=1e-5) and min(aux) > 1
    assert one[0] > 6.2 + COEFFICIENT  # cross-entropy is about 6.3
