"""Each recipe, its model made tiny and its data few, trains: the settings go together and do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import cli, scenarios
from support.families import OF, config_of
from support.ranks import run_ranks
from support.tiny import PAIRS, saved_model, tokenizer_folder

from shardwise.config.load import load_run
from shardwise.core.errors import UserError
from shardwise.recipes import copy_recipe, recipe, recipes

# The architecture of each family of names.
FAMILIES = {
    "smollm2": "llama", "llama": "llama", "qwen3-30b": "qwen3_moe", "qwen3": "qwen3", "mistral": "mistral",
    "mixtral": "mixtral", "gemma": "gemma2", "phi": "phi3", "gpt2": "gpt2", "falcon": "falcon", "gpt-oss": "gpt_oss",
    "bert": "bert", "t5": "t5",
}  # fmt: skip
QUICK = {"llama-3.1-8b-lora-24gb", "llama-3.1-8b-dpo", "bert-classify", "t5-seq2seq", "qwen3-30b-a3b-moe-8gpu"}
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in recipes()]


def _family(name: str) -> str:
    return next(kind for start, kind in FAMILIES.items() if name.startswith(start))


def _rows(name: str, path: str) -> list[dict[str, Any]]:
    """Rows of the kind that the recipe's file would hold."""
    chats = [json.loads(line)["messages"][-2:] for line in PAIRS.read_text().splitlines()][:24]
    asked = [(q["content"], a["content"]) for q, a in chats]
    if "preferences" in path:
        return [{"prompt": q, "chosen": a, "rejected": "No."} for q, a in asked]
    if "feedback" in path:
        return [{"prompt": q, "completion": a, "label": i % 2 == 0} for i, (q, a) in enumerate(asked)]
    if "reviews" in path:
        return [{"text": text, "label": label} for pair in asked for text, label in zip(pair, ("q", "a"), strict=True)]
    if "pairs" in path:
        return [{"source": q, "target": a} for q, a in asked]
    if "instructions" in path:
        return [{"prompt": q, "completion": a} for q, a in asked]
    if "chat" in path:
        return [{"messages": c} for c in chats]
    return [{"text": a} for _, a in asked]


def _tiny(name: str, folder: Path) -> dict[str, Any]:
    """The recipe with everything small: the model, the data, the batch; what it is about stays."""
    run: dict[str, Any] = yaml.safe_load(recipe(name))
    if isinstance(run["model"], str):
        family = _family(name)
        task = next((t for t, kinds in OF.items() if family in kinds), "causal")
        run["model"] = saved_model(folder / "model", config_of(family), task=task)
    else:
        run["model"] = {"config": config_of("llama"), "tokenizer": tokenizer_folder(folder / "tokenizer")}
    sources = run["data"]["train"] if isinstance(run["data"]["train"], list) else [{"path": run["data"]["train"]}]
    for number, source in enumerate(sources):
        file = folder / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in _rows(name, source["path"])))
        source["path"] = str(file)
    run["data"] |= {"train": sources, "sequence_length": 160, "over_length": "drop"}
    if "eval" in run["data"]:
        run["data"]["eval"] = "10%"
    run["train"] = run["train"] | {"steps": 2, "batch_size": 4, "micro_batch_size": 2, "warmup": 0}
    run["train"].pop("epochs", None)
    if "hpz_size" in run.get("parallel", {}):
        run["parallel"]["hpz_size"] = 1
    if run.get("objective", {}) and "teacher" in run["objective"]:
        run["objective"]["teacher"] = saved_model(folder / "teacher", config_of(_family(name)), seed=1)
    return run | {"device": "cpu", "precision": "fp32", "checkpoint": {"every": None}, "output": str(folder / "out")}


@pytest.mark.parametrize("name", NAMES)
def test_recipe_trains(name: str, tmp_path: Path) -> None:
    run = _tiny(name, tmp_path)
    losses, norms, _ = run_ranks(scenarios.train, 1, run)[0]
    assert len(losses) == 2 and all(torch.isfinite(torch.tensor([*losses, *norms])))
    assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize("name", recipes())
def test_recipe_is_valid(name: str, tmp_path: Path) -> None:
    """As it stands: the schema takes it, and its first line says what it is for."""
    run = load_run(copy_recipe(name, tmp_path), []).run
    assert run.output.startswith("out/")
    assert 10 < len(recipes()[name]) < 100


def test_at_least_twenty_recipes_for_every_family() -> None:
    assert len(recipes()) >= 20
    assert {_family(name) for name in recipes()} == set(FAMILIES.values())


def test_command(tmp_path: Path) -> None:
    code, out, _ = cli.command("recipes")
    assert code == 0 and all(name in out for name in recipes())
    target = tmp_path / "run.yaml"
    assert cli.command("recipes", "bert-masked", target)[0] == 0
    assert target.read_text() == recipe("bert-masked")
    code, _, err = cli.command("recipes", "bert-masked", target)
    assert code == 2 and "exists" in err
    code, _, err = cli.command("recipes", "bert-maskd", target)
    assert code == 2 and "bert-masked" in err


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="did you mean"):
        recipe("llama-3.1-8b-lora")
