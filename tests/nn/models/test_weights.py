"""Weights get into the shards exactly, whatever the files look like, and no rank holds the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import scenarios
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, TIED, saved_model, tiny_run, tokenizer_folder

MIXTRAL = dict(
    model_type="mixtral",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    vocab_size=515,
    max_position_embeddings=512,
)


def reference(folder: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LLAMA, marks=pytest.mark.slow, id="llama"),
        pytest.param(TIED, id="tied"),
        pytest.param(GPT2, marks=pytest.mark.slow, id="gpt2"),
        pytest.param(MIXTRAL, id="mixtral"),
    ],
)
def test_equal_to_transformers(config: dict, tmp_path: Path) -> None:
    """Mixtral's files name single experts and need transformers' conversion; the others are read as they are."""
    folder = saved_model(tmp_path / "model", config)
    loaded = run_ranks(scenarios.loaded_parameters, 3, tiny_run(tmp_path, folder, parallel__zero=3))[0]
    expected = reference(folder)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[n], expected[n]) for n in expected)


def test_several_files_in_bf16_with_bare_names(tmp_path: Path) -> None:
    """An index over two files, half precision, and names without the base model's prefix, as old checkpoints have."""
    folder = Path(saved_model(tmp_path / "model", GPT2))
    tensors = {k.removeprefix("transformer."): v.bfloat16() for k, v in load_file(folder / "model.safetensors").items()}
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {n: f for f, members in parts.items() for n in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = run_ranks(scenarios.loaded_parameters, 2, tiny_run(tmp_path, str(folder), parallel__zero=3))[0]
    assert all(torch.equal(loaded[f"transformer.{n}"], tensors[n].float()) for n in names if n != "lm_head.weight")


def test_from_scratch_is_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, {"config": GPT2, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")})
    one = run_ranks(scenarios.loaded_parameters, 1, run)[0]
    three = run_ranks(scenarios.loaded_parameters, 3, run | {"parallel": {"zero": 3}})[0]
    assert all(torch.equal(one[n], three[n]) for n in one)
    other = run_ranks(scenarios.loaded_parameters, 1, run | {"train": run["train"] | {"seed": 1}})[0]
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])
    # GPT-2 scales its residual projections by depth: the authors' initialisation was used, not torch's.
    assert one["transformer.h.0.mlp.c_proj.weight"].std() < 0.7 * one["transformer.h.0.mlp.c_fc.weight"].std()
    assert one["transformer.ln_f.weight"].eq(1).all() and one["transformer.ln_f.bias"].eq(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["files", "scratch"])
def test_no_rank_holds_the_whole_model(origin: str, tmp_path: Path) -> None:
    """More than 1 GB at stage 3 on four ranks: what a rank takes besides its quarter is far less than the rest."""
    config = LLAMA | dict(
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    model = (
        saved_model(tmp_path / "model", config)
        if origin == "files"
        else {"config": config, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    )
    results = run_ranks(scenarios.load_and_watch, 4, tiny_run(tmp_path, model, parallel__zero=3), timeout=280)
    whole, bound = sum(r["held"] for r in results), 200 << 20
    assert whole > 1e9
    for rank, result in enumerate(results):
        besides = result["peak"] - result["before"] - result["held"]
        print(f"\nrank {rank}: model {whole / 1e9:.2f} GB, {besides >> 20} MiB besides its {result['held'] >> 20}")
        assert besides < bound < (whole - result["held"]) / 3  # 8 MiB from files, 53 where values are made
