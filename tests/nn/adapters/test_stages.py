"""Every method at every ZeRO stage: the same losses as one rank, what is trained, and what is held for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import adapters
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, saved_model, tiny_run

MODELS = {"llama": LLAMA, "gpt2": GPT2}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": {"type": "lora", "rank": 4, "rank_pattern": {"*.1.*": 6}, "rslora": True}},
    "dora": {"method": {"type": "lora", "rank": 4, "dora": True}},
    "ia3": {"method": "ia3", "train__learning_rate": 0.05},
    "freeze": {"freeze": ["embed_tokens", "wte", "*.0.*"]},
}
STAGES = (0, 1, 2, 3)
BOUND = 1e-5
HIDDEN, INNER, VALUES = 48, 96, 24  # of the tiny Llama


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    for name, config in MODELS.items():
        saved_model(folder / name, config)
    return folder


def runs(
    tmp: Path, folder: str, ranks: int, stages: tuple[int, ...], methods: dict[str, Any] = METHODS, steps: int = 3
) -> dict[Any, dict[str, Any]]:
    """One run for each method and stage."""
    model = Path(folder).name
    return {
        (method, zero): tiny_run(
            tmp, folder, train__steps=steps, train__micro_batch_size=3, parallel__zero=zero, ranks=ranks,
            output=str(tmp / f"{model}-{method}-{zero}-{ranks}"),
            **({k: v for k, v in settings.items() if k != "freeze"}
               | ({"freeze": frozen(settings["freeze"], model)} if "freeze" in settings else {})),
        )
        for method, settings in methods.items() for zero in stages
    }  # fmt: skip


def frozen(patterns: list[str], model: str) -> list[str]:
    """What this model has of them."""
    return [p for p in patterns if p != ("wte" if model == "llama" else "embed_tokens")]


@pytest.fixture(scope="module")
def alone(tmp: Path) -> dict[str, dict[Any, adapters.Trained]]:
    """Each method on one rank, at stages 0 and 3, and the losses of a model that learns nothing."""
    results = {}
    for name in MODELS:
        asked = runs(tmp, str(tmp / name), 1, (0, 3))
        still = asked["ia3", 0] | {"output": str(tmp / f"{name}-still")}
        asked["still", 0] = still | {"train": still["train"] | {"learning_rate": 1e-9}}
        results[name] = run_ranks(adapters.train_each, 1, asked)[0]
    return results


def check_equal(alone: dict[Any, adapters.Trained], together: list[dict[Any, adapters.Trained]]) -> None:
    for (method, zero), (losses, _) in together[0].items():
        expected = alone[method, 0][0]
        assert losses == pytest.approx(expected, abs=BOUND), (method, zero)
        # Each step has other data, so the first loss would be no measure.
        assert method == "still" or losses[-1] < alone["still", 0][0][-1], (method, zero)


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_learns_the_same_at_any_stage(alone: dict[str, Any], model: str) -> None:
    check_equal(alone[model], [alone[model]])


def expected_trainable(method: str) -> int:
    """The formula for the tiny Llama, written out."""
    shapes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, VALUES), "v": (HIDDEN, VALUES), "o": (HIDDEN, HIDDEN),
              "gate": (HIDDEN, INNER), "up": (HIDDEN, INNER), "down": (INNER, HIDDEN)}  # fmt: skip
    sides = sum(a + b for a, b in shapes.values())
    if method == "lora":
        return sides * (4 + 6 + 4)
    if method == "dora":
        return 3 * (4 * sides + sum(out for _, out in shapes.values()))
    if method == "ia3":
        return 3 * (VALUES + VALUES + INNER)
    block = sum(a * b for a, b in shapes.values()) + 2 * HIDDEN
    return 2 * block + HIDDEN + 515 * HIDDEN


@pytest.mark.parametrize("method", METHODS)
def test_what_is_trained_and_what_is_held(tmp: Path, alone: dict[str, Any], method: str) -> None:
    """Counts and bytes by formula; frozen ones take their bytes once; checkpoints hold what is trained."""
    trainable = expected_trainable(method)
    whole = 3 * (48 * 48 * 2 + 48 * 24 * 2 + 48 * 96 * 3 + 2 * 48) + 48 + 2 * 515 * 48
    for zero in (0, 3):
        _, facts = alone["llama"][method, zero]
        adapted = facts["adapted"]
        assert facts["trainable"] == adapted.trainable == trainable
        assert adapted.parameters == whole
        assert facts["held"]["optimizer"] == 12 * trainable
        frozen_count = whole - (trainable if method == "freeze" else 0)
        assert adapted.frozen == frozen_count
        assert facts["held"]["frozen"] == 4 * frozen_count == adapted.frozen_bytes
        if method == "freeze":
            assert not any("layers.0." in n or "embed_tokens" in n for n in facts["stored"])
        else:
            assert all(n.rpartition(".")[2] in ("lora_A", "lora_B", "lora_magnitude", "ia3_l") for n in facts["stored"])


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_two_ranks(tmp: Path, alone: dict[str, Any], model: str) -> None:
    together = run_ranks(adapters.train_each, 2, runs(tmp, str(tmp / model), 2, STAGES))
    check_equal(alone[model], together)
    for method, zero in together[0]:
        held = [result[method, zero][1]["held"] for result in together]
        adapted = together[0][method, zero][1]["adapted"]
        shards = 1 if zero == 0 else 2
        # FSDP fills the shards of 515 rows up to 516.
        assert sum(h["optimizer"] for h in held) == pytest.approx(12 * adapted.trainable * 2 / shards, rel=2e-3)
        assert sum(h["frozen"] for h in held) == pytest.approx(adapted.frozen_bytes * (1 if zero == 3 else 2), rel=2e-3)


EVERY: dict[str, dict[str, Any]] = METHODS | {
    "full": {},
    "qlora": {"method": {"type": "qlora", "rank": 4}},
    "qlora, 8 bits": {"method": {"type": "qlora", "rank": 4, "bits": "int8"}},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", MODELS)
def test_every_method_at_every_stage_on_one_two_and_four_ranks(tmp: Path, model: str) -> None:
    """Losses within BOUND of one rank at stage 0, and lower than those of a model that learns nothing; held bytes."""
    found: dict[int, list[dict[Any, adapters.Trained]]] = {}
    for ranks in (1, 2, 4):
        asked = runs(tmp / "table", str(tmp / model), ranks, STAGES, EVERY, steps=6)
        still = asked["lora", 0] | {"output": str(tmp / "table" / f"{model}-still-{ranks}")}
        asked["still", 0] = still | {"train": still["train"] | {"learning_rate": 1e-9}}
        found[ranks] = run_ranks(adapters.train_each, ranks, asked, timeout=1200)
    alone = found[1][0]
    print(f"\n{model}: method, stage, ranks: largest difference of losses; last loss; trained; optimizer bytes a rank")
    for ranks, results in found.items():
        for (method, zero), (losses, facts) in results[0].items():
            expected, trainable = alone[method, 0][0], facts["adapted"].trainable
            apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            held = [result[method, zero][1]["held"]["optimizer"] for result in results]
            print(f"{method:14} {zero} {ranks}  {apart:.1e}  {losses[-1]:.4f}  {trainable:7}  {max(held):8}")
            assert apart <= BOUND, (method, zero, ranks)
            assert method == "still" or losses[-1] < alone["still", 0][0][-1], (method, zero)
            # FSDP fills shards up: 6 rows on 4 ranks are 8.
            assert 1 <= sum(held) / (12 * trainable * (ranks if zero == 0 else 1)) <= 1.1, (method, zero, ranks)


def test_half_precision_stores_frozen_weights_in_it(tmp: Path, cpu_precision_env: dict[str, str]) -> None:
    """Masters in fp32, the base in bf16 and so in half the bytes; every stage learns alike."""
    half = {
        zero: tiny_run(
            tmp, str(tmp / "llama"), train__steps=3, train__micro_batch_size=3, parallel__zero=zero, ranks=2,
            precision="bf16", method="lora", output=str(tmp / f"half-{zero}"),
        )
        for zero in (0, 2, 3)
    }  # fmt: skip
    results = run_ranks(adapters.train_each, 2, half, env=cpu_precision_env)
    for zero, (losses, facts) in results[0].items():
        assert facts["trained_types"] == {torch.float32} and facts["frozen_types"] == {torch.bfloat16}
        assert facts["adapted"].frozen_bytes == 2 * facts["adapted"].parameters
        assert losses == pytest.approx(results[0][0][0], abs=2e-3) and losses[-1] < losses[0], zero


VARIANTS: dict[str, dict[str, Any]] = {
    "host": {"offload__optimizer": "cpu"},
    "disk": {"offload__optimizer": "disk", "offload__parameters": "disk", "parallel__zero": 3},
    "shelf": {"offload__optimizer": "cpu", "offload__parameters": "cpu", "parallel__zero": 3},
    "optimizer_in_backward": {"train__optimizer_in_backward": True, "train__max_grad_norm": None},
    "recompute": {"recompute": "full", "parallel__zero": 3},
    "bucket": {"parallel__bucket": 20_000, "parallel__zero": 3},
    "hpz": {"parallel__hpz_size": 1, "parallel__zero": 3},
    "dropout": {"method": {"type": "lora", "dropout": 0.5}},
}
ROUNDED = {
    "qwz": {"parallel__quantize_weights": True, "parallel__zero": 3},
    "qgz": {"parallel__quantize_gradients": True},
}


def test_other_settings_go_with_frozen_parameters(tmp: Path) -> None:
    """Offload, updates in backward, recomputation, buckets and ZeRO++: the same losses as without."""

    def run(name: str, changes: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "method": {"type": "lora", "dora": True, "modules_to_save": ["lm_head"]},
            "ranks": 2,
        } | changes
        return tiny_run(tmp, str(tmp / "llama"), train__steps=3, train__micro_batch_size=3,
                        output=str(tmp / f"with-{name}"), **settings)  # fmt: skip

    asked = {"plain": {}, "unclipped": {"train__max_grad_norm": None}} | VARIANTS | ROUNDED
    results = run_ranks(adapters.train_each, 2, {name: run(name, changes) for name, changes in asked.items()})[0]
    for name, (losses, _) in results.items():
        if name == "dropout":
            assert losses[1:] != pytest.approx(results["plain"][0][1:], abs=1e-4)
            continue
        plain = results["unclipped" if name in ("unclipped", "optimizer_in_backward") else "plain"][0]
        assert losses == pytest.approx(plain, abs=2e-2 if name in ROUNDED else BOUND), name


def test_the_base_is_there_all_the_time(tmp: Path) -> None:
    """adapter_disabled: the bare base's own logits, at each stage, recomputing or not; the adapter's come back."""
    from transformers import AutoModelForCausalLM

    asked = [
        tiny_run(tmp, str(tmp / "llama"), train__steps=2, train__micro_batch_size=3, ranks=2, parallel__zero=zero,
                 recompute=again, method=method, output=str(tmp / f"bare-{zero}-{again}-{method}"))
        for zero in STAGES for again in ("none", "full") for method in ("lora", "ia3")
    ]  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(tmp / "llama").eval()
    with torch.no_grad():
        expected = base(input_ids=adapters.IDS).logits
    for first, bare, again in run_ranks(adapters.bare_logits, 2, asked)[0]:
        assert torch.equal(bare, expected)
        assert torch.equal(first, again) and not torch.equal(first, bare)
