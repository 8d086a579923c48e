"""Grouped experts against the models' own loops, in every way that transformers stack them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import QWEN3_MOE
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe

from shardwise.nn.moe.grouped_experts import NAME, use_grouped_experts

SMALL = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=128, num_experts_per_tok=2)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gate and up in one": QWEN3_MOE | dict(num_hidden_layers=2, vocab_size=128),
    "one expert each": QWEN3_MOE | dict(num_hidden_layers=2, vocab_size=128, num_experts_per_tok=1),
    "few": SMALL | dict(model_type="mixtral", num_local_experts=4),
    "turned over, with biases": SMALL | dict(model_type="gpt_oss", num_local_experts=8, head_dim=16),
}


def model_of(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    values = dict(MODELS[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    for key, parameter in model.named_parameters():
        if "bias" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(device=device, dtype=dtype)


def answer(model: Any, implementation: str) -> dict[str, torch.Tensor]:
    model.config._experts_implementation = implementation
    model.zero_grad()
    ids = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(1)).to(model.device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(float((found[k] - w).norm() / w.norm().clamp(min=1e-12)) for k, w in wanted.items())


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_of_the_models_own_loop(name: str) -> None:
    model = model_of(name)
    assert len(use_grouped_experts(model)) == 2
    difference = furthest(answer(model, NAME), answer(model, "eager"))
    print(name, difference)
    assert difference < 5e-6


def test_experts_that_nobody_asks_get_zeros() -> None:
    model = model_of("gate and up in one")
    use_grouped_experts(model)
    experts = model.model.layers[0].mlp.experts
    rows = torch.randn(5, 64, requires_grad=True)
    chosen = torch.tensor([[0, 3], [3, 0], [0, 3], [3, 0], [0, 3]])
    weights = torch.rand(5, 2, requires_grad=True)
    model.zero_grad()
    experts(rows, chosen, weights).sum().backward()
    asked = experts.gate_up_proj.grad.flatten(1).any(1)
    assert asked.tolist() == [number in (0, 3) for number in range(8)]
    assert weights.grad is not None and weights.grad.abs().min() > 0


def test_what_others_chose_stays() -> None:
    model = model_of("few")
    model.config._experts_implementation = "eager"
    assert use_grouped_experts(model) == []
    assert NAME in moe.ALL_EXPERTS_FUNCTIONS
    assert NAME not in model.config.to_json_string(use_diff=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_in_bf16(name: str) -> None:
    """No further from fp32 than transformers' own grouping is, give or take."""
    exact = answer(model_of(name, torch.float32, "cuda"), "eager")
    model = model_of(name, torch.bfloat16, "cuda")
    use_grouped_experts(model)
    ours, theirs = ({k: v.float() for k, v in answer(model, how).items()} for how in (NAME, "grouped_mm"))
    apart = [furthest(found, exact) for found in (ours, theirs)]
    print(name, apart)
    assert apart[0] <= 1.5 * apart[1] + 1e-2
