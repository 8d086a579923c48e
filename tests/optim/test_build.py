"""What decays and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import GPT2, LLAMA

from shardwise.config.schema import Train
from shardwise.optim.build import build_optimizer, decay_groups


def tiny(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_norms_and_biases_do_not_decay(config: dict[str, Any]) -> None:
    """By what a step with no gradient does: decayed parameters shrink by rate × decay, the others do not move."""
    model = tiny(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # fresh biases are zeros, which cannot be seen to shrink
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    build_optimizer(dict(model.named_parameters()), Train(learning_rate=0.1, weight_decay=0.5), model).step()
    plain = {name for name in before if "norm" in name or ".ln_" in name or name.endswith(".bias")}
    assert plain and {name for name, p in model.named_parameters() if torch.equal(p, before[name])} == plain
    for name, parameter in model.named_parameters():
        if name not in plain:
            torch.testing.assert_close(parameter, before[name] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_every_parameter_is_in_one_group(config: dict[str, Any]) -> None:
    parameters = dict(tiny(config).named_parameters())
    groups: list[dict[str, Any]] = decay_groups(parameters, 0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in parameters.values())
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}
    for group in groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])


def test_a_group_without_members_is_left_out() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert len(decay_groups({"weight": weight}, 0.1)) == 1


def test_the_run_s_settings_arrive() -> None:
    model = tiny(LLAMA)
    train = Train(learning_rate=0.125, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.25)
    optimizer = build_optimizer(dict(model.named_parameters()), train, model)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.125, (0.5, 0.75), 1e-3)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_norms_decay_where_the_run_says_so() -> None:
    """As torch's AdamW over model.parameters() does: one group, everything shrinks."""
    model = tiny(LLAMA)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(parameters, Train(weight_decay=0.25, decay_norms=True), model)
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["weight_decay"] == 0.25
    assert len(optimizer.param_groups[0]["params"]) == len(parameters)
