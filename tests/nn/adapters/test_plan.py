"""Which modules a method means, by settings and by folders, and what is said of mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import GPT2, LLAMA, TIED, saved_model, tiny_run

from shardwise.config.load import load_run
from shardwise.config.resolve import resolve_machine
from shardwise.core.errors import UserError
from shardwise.nn.adapters.apply import Adapted, apply_method
from shardwise.nn.adapters.layers import LoraLayer, adapter_disabled
from shardwise.nn.adapters.targets import shortest
from shardwise.nn.models.build import build_on_meta
from shardwise.nn.models.source import find_model

MOE = dict(
    model_type="mixtral", hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=515, max_position_embeddings=128, num_local_experts=4, num_experts_per_tok=2,
)  # fmt: skip
CONFIGS = {"llama": LLAMA, "tied": TIED, "gpt2": GPT2, "mixtral": MOE}


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    for name, config in CONFIGS.items():
        saved_model(folder / name, config)
    return folder


def applied(tmp: Path, name: str, **changes: Any) -> tuple[Any, Adapted]:
    """A model on `meta` with a run's method."""
    run = resolve_machine(load_run(tiny_run(tmp, str(tmp / name), **changes)).run).run
    model = build_on_meta(find_model(run.model))
    return model, apply_method(model, run)


def test_linear_means_all_but_the_head(tmp: Path) -> None:
    _, adapted = applied(tmp, "llama", method="lora")
    assert adapted.plan is not None and len(adapted.plan.targets) == 3 * 7
    assert adapted.left_out == ("model.embed_tokens", "lm_head")
    _, adapted = applied(tmp, "gpt2", method="lora")
    assert adapted.plan is not None and len(adapted.plan.targets) == 3 * 4
    assert adapted.left_out == ("transformer.wte", "transformer.wpe")


def test_stacks_of_experts_are_named_as_left_out(tmp: Path) -> None:
    _, adapted = applied(tmp, "mixtral", method="lora")
    assert any("experts" in name and "*" in name for name in adapted.left_out), adapted.left_out


@pytest.mark.parametrize(
    ("targets", "count"),
    [("q_proj", 3), (["q_proj", "v_proj"], 6), ("*.mlp.*", 9), ("layers.1.self_attn.o_proj", 1), ("lm_head", 1)],
)
def test_patterns(tmp: Path, targets: Any, count: int) -> None:
    model, adapted = applied(tmp, "llama", method={"type": "lora", "target_modules": targets})
    assert adapted.plan is not None and len(adapted.plan.targets) == count
    assert sum(isinstance(m, LoraLayer) for m in model.modules()) == count


def test_ranks_and_scales(tmp: Path) -> None:
    """The last pattern that matches decides; alpha is 2 × rank; rslora divides by the root."""
    method = {"type": "lora", "rank": 8, "rank_pattern": {"*.mlp.*": 4, "*.mlp.down_proj": 2}}
    model, adapted = applied(tmp, "llama", method=method)
    plan = adapted.plan
    assert plan is not None
    up, down, query = (f"model.layers.0.{n}" for n in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj"))
    assert (plan.ranks[up], plan.ranks[down], plan.ranks[query]) == (4, 2, 8)
    assert model.get_submodule(down).lora_A.shape == (2, 96) and model.get_submodule(down).lora_B.shape == (48, 2)
    assert (plan.scale(up), plan.scale(query)) == (4.0, 2.0)
    _, adapted = applied(tmp, "llama", method=method | {"rslora": True, "alpha": 3})
    assert adapted.plan is not None and adapted.plan.scale(up) == 1.5


def test_modules_trained_whole(tmp: Path) -> None:
    """They are trained beside the adapters, and not adapted; tied ones are one parameter."""
    model, adapted = applied(tmp, "tied", method={"type": "lora", "modules_to_save": ["lm_head", "layers.2.mlp"]})
    assert adapted.plan is not None and not any("layers.2.mlp" in n for n in adapted.plan.targets)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {"model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"} <= trained
    assert adapted.kept is not None and {"lm_head.weight", "model.embed_tokens.weight"} <= adapted.kept
    with pytest.raises(UserError, match="trained whole"), adapter_disabled(model):
        pass


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"method": {"type": "lora", "target_modules": "q_prj"}}, "method.target_modules.*did you mean q_proj"),
    ("llama", {"method": {"type": "lora", "target_modules": "embed_tokens"}}, "no linear layer"),
    ("tied", {"method": {"type": "lora", "target_modules": "lm_head"}}, "shares its weight with model.embed_tokens"),
    (
        "llama",
        {"method": {"type": "lora", "modules_to_save": "lm_haed"}},
        "method.modules_to_save.*did you mean lm_head",
    ),
    ("llama", {"method": {"type": "lora", "rank_pattern": {"k_prj": 2}}}, "method.rank_pattern.*matches none"),
    ("llama", {"method": {"type": "ia3", "target_modules": "q_prj"}}, "did you mean q_proj"),
    ("llama", {"freeze": "emb_tokens"}, "freeze.*did you mean embed_tokens"),
    ("llama", {"freeze": "nothing"}, "e.g. embed_tokens, q_proj, k_proj"),
    ("llama", {"method": {"type": "lora", "target_modules": "all-linear"}}, "write target_modules: linear"),
    ("llama", {"method": {"type": "lora", "target_modules": ["linear"]}}, "write target_modules: linear"),
    ("llama", {"freeze": "*"}, "leaves nothing to train"),
    ("llama", {"method": "lora", "freeze": "lm_head"}, "no parameter that is trained"),
    ("llama", {"export__merged": True}, "no adapter to merge"),
    ("llama", {"method": {"type": "lora", "adapter": "nowhere"}}, "there is no such folder"),
]


@pytest.mark.parametrize(("model", "changes", "message"), MISTAKES)
def test_mistakes(tmp: Path, model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        applied(tmp, model, **changes)


def test_an_adapter_needs_a_base_in_files(tmp: Path) -> None:
    with pytest.raises(UserError, match="starts from scratch"):
        resolve_machine(load_run(tiny_run(tmp, method="lora")).run)


def test_shortest_endings_mean_no_other_module() -> None:
    names = ["a.0.q", "a.1.q", "b.o"]
    assert shortest(names, [*names, "a.0.o", "a.1.k"]) == ["q", "b.o"]
    assert shortest(["a.wo"], ["a.wo", "a.two"], dotted=False) == ["a.wo"]


def test_frozen_weights_in_the_compute_type_stay_tied(tmp: Path) -> None:
    model, adapted = applied(tmp, "tied", method="lora", precision="bf16")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert adapted.frozen_bytes == 2 * adapted.parameters
