"""PEFT's folders in and out: no difference in parameters, and the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import adapters
from support.ranks import run_ranks
from support.tiny import GPT2, LLAMA, TIED, saved_model, tiny_run, tokenizer_folder

from shardwise.core.errors import UserError
from shardwise.export.inference import load_for_inference

peft = pytest.importorskip("peft")

CONFIGS = {"llama": LLAMA, "tied": TIED, "gpt2": GPT2}
BOUND = 1e-6
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"type": "lora", "rank": 4, "rank_pattern": {"*.1.*": 6}, "alpha": 5.5}),
    "rslora": ("gpt2", {"type": "lora", "rank": 4, "rslora": True, "target_modules": ["c_attn", "mlp.c_proj"]}),
    "dora": ("llama", {"type": "lora", "rank": 4, "dora": True, "modules_to_save": ["lm_head"]}),
    "dora-gpt2": ("gpt2", {"type": "lora", "rank": 4, "dora": True}),
    "ia3": ("llama", {"type": "ia3"}),
    "ia3-gpt2": ("gpt2", {"type": "ia3"}),
    "also-tied": ("tied", {"type": "lora", "rank": 4, "modules_to_save": ["lm_head"]}),
}
THEIRS: dict[str, tuple[str, Any]] = {
    "lora": ("llama", lambda: peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", use_rslora=True,
                                              rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3})),
    "regex": ("llama", lambda: peft.LoraConfig(r=4, target_modules=r".*layers\.[01]\.mlp\.(up|down)_proj",
                                               modules_to_save=["lm_head"], use_dora=True)),
    "gpt2": ("gpt2", lambda: peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "ia3": ("llama", lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"],
                                            feedforward_modules=["down_proj"])),
}  # fmt: skip


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    for name, config in CONFIGS.items():
        saved_model(folder / name, config)
    return folder


def base(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=adapters.IDS).logits


@pytest.fixture(scope="module")
def ours(tmp: Path) -> dict[str, Path]:
    """A short run of each case: its output folder."""
    runs = {
        name: tiny_run(tmp, str(tmp / model), train__steps=2, train__micro_batch_size=6, parallel__zero=3,
                       train__learning_rate=0.02, method=method, output=str(tmp / f"ours-{name}"))
        for name, (model, method) in CASES.items()
    }  # fmt: skip
    run_ranks(adapters.train_each, 1, runs)
    return {name: Path(run["output"]) for name, run in runs.items()}


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_we_write(tmp: Path, ours: dict[str, Path], case: str) -> None:
    """Every tensor arrives where it belongs, unchanged; peft's model and ours give the same logits."""
    folder, name = ours[case] / "model", CASES[case][0]
    stored = load_file(folder / "adapter_model.safetensors")
    plain = logits(base(tmp / name))
    loaded = peft.PeftModel.from_pretrained(base(tmp / name), folder).eval()
    found = peft.get_peft_model_state_dict(loaded)
    assert set(found) == set(stored)
    assert all(torch.equal(found[key], stored[key]) for key in stored)
    mine, tokenizer = load_for_inference(str(ours[case]))
    expected = logits(mine)
    assert (logits(loaded) - expected).abs().max() <= BOUND
    assert (expected - plain).abs().max() > 1e-3, "the adapter does something"
    assert tokenizer.vocab_size > 0
    assert peft.PeftConfig.from_pretrained(folder).base_model_name_or_path == str(tmp / name)


def test_transformers_finds_the_base_by_itself(tmp: Path, ours: dict[str, Path]) -> None:
    assert (
        logits(base(ours["lora"] / "model")) - logits(load_for_inference(str(ours["lora"]))[0])
    ).abs().max() <= BOUND


@pytest.fixture(scope="module")
def theirs(tmp: Path) -> dict[str, Path]:
    """Adapters that peft made, with values of their own everywhere."""
    folders = {}
    for name, (model, config) in THEIRS.items():
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(base(tmp / model), config())
        for key, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "lora_magnitude" not in key:
                parameter.data += 0.05 * torch.randn_like(parameter)
        wrapped.save_pretrained(folders.setdefault(name, tmp / f"theirs-{name}"))
        torch.save(logits(wrapped.eval()), tmp / f"theirs-{name}.pt")
    return folders


@pytest.mark.parametrize("case", THEIRS)
def test_we_load_what_peft_writes(tmp: Path, theirs: dict[str, Path], case: str) -> None:
    model, _ = load_for_inference(str(theirs[case]), changed_tokenizer=True)
    assert (logits(model) - torch.load(tmp / f"theirs-{case}.pt")).abs().max() <= BOUND


def test_training_goes_on_from_what_peft_writes(tmp: Path, theirs: dict[str, Path]) -> None:
    """The first values are the adapter's to the last bit; and what goes out again has its keys and settings."""
    for case in THEIRS:
        kind = "ia3" if case == "ia3" else "lora"
        run = tiny_run(tmp, str(tmp / THEIRS[case][0]), train__steps=1, parallel__zero=3,
                       method={"type": kind, "adapter": str(theirs[case])}, output=str(tmp / f"on-{case}"),
                       train__learning_rate=1e-12)  # fmt: skip
        start = run_ranks(adapters.starting_values, 1, run)[0]
        before = load_file(theirs[case] / "adapter_model.safetensors")
        from shardwise.nn.adapters.peft import read_adapter, read_tensors

        given = read_tensors(theirs[case], read_adapter(theirs[case]))
        assert len(given) == len(before) and all(torch.equal(start[n], t) for n, t in given.items())
        run_ranks(adapters.train, 1, run)
        after = load_file(Path(run["output"]) / "model/adapter_model.safetensors")
        assert {k: v.shape for k, v in after.items()} == {k: v.shape for k, v in before.items()}
        assert all((after[k] - before[k]).abs().max() < 1e-6 for k in before)


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"rank": 5}, "method.rank"), ({"alpha": 7}, "method.alpha"), ({"dora": True}, "method.dora"),
     ({"target_modules": "q_proj"}, "method.target_modules"),
     ({"modules_to_save": "lm_head"}, "method.modules_to_save")],
)  # fmt: skip
def test_settings_must_not_contradict_the_adapter(
    tmp: Path, theirs: dict[str, Path], settings: dict[str, Any], field: str
) -> None:
    from shardwise.config.methods import Lora
    from shardwise.nn.adapters.plan import plan_method

    with pytest.raises(UserError, match=f"(?s){field}.*comes with the adapter"):
        plan_method(base(tmp / "llama"), Lora(adapter=str(theirs["lora"]), **settings))


def test_what_is_not_known_is_refused(tmp: Path, theirs: dict[str, Path]) -> None:
    from shardwise.nn.adapters.peft import read_adapter

    for key, value in {"bias": "all", "peft_type": "VERA", "layer_replication": [[0, 2]]}.items():
        folder = tmp / f"odd-{key}"
        folder.mkdir()
        config = json.loads((theirs["lora"] / "adapter_config.json").read_text()) | {key: value}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(UserError):
            read_adapter(folder)
    tokenizer_folder(tmp / "tokenizer")
