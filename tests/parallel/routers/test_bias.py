"""The bias of balancing without a loss: by which tokens it moves, when it does not, and where it lives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shardwise.config.schema import LossScale
from shardwise.nn.tiny.shrink import shrink
from shardwise.optim.scaler import LossScaler
from shardwise.parallel.expert.apply import count_loads
from shardwise.parallel.routers.bias import BiasUpdate
from shardwise.parallel.routers.find import find_routers
from shardwise.parallel.routers.token_groups import Tokens
from shardwise.parallel.zero.update import OptimizerStep


def made(name: str) -> tuple[Any, Any, BiasUpdate]:
    torch.manual_seed(0)
    config = shrink(CONFIG_MAPPING[name]())
    config._experts_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_config(config).float().train()
    found, loads = find_routers(config, "causal"), count_loads(model, torch.device("cpu"))
    assert found is not None and loads is not None
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    return model, loads, BiasUpdate(model, found.biases, loads, mesh, 0.5)


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe", "minimax_m2"])
def test_it_follows_the_tokens_of_a_step(name: str, group: Any) -> None:
    model, loads, update = made(name)
    assert update.biases and all(bias.tensor.dtype == torch.float32 for bias in update.biases.values())
    # Also where the model has it as a parameter: a buffer is not sharded, cast or trained.
    assert not any(key in dict(model.named_parameters()) for key in update.biases)
    assert set(update.biases) <= set(model.state_dict())
    ids = torch.randint(3, 90, (2, 12))
    model(input_ids=ids)
    counts = loads.read()
    update()
    for bias in update.biases.values():
        load = counts[bias.row].float()
        assert load.sum() > 0
        assert torch.equal(bias.tensor.flatten(), 0.5 * torch.sign(load.mean() - load))
    before = {name: bias.tensor.clone() for name, bias in update.biases.items()}
    update()  # a step without tokens
    assert all(torch.equal(before[name], bias.tensor) for name, bias in update.biases.items())
    assert torch.equal(loads.read(), counts), "what is reported is of all steps since the last report"


def test_a_skipped_step_moves_nothing(group: Any) -> None:
    model, _, update = made("deepseek_v3")
    ids = torch.randint(3, 90, (2, 12))
    for taken in (False, torch.tensor(0.0)):
        model(input_ids=ids)
        update(taken)
        assert not any(bias.tensor.any() for bias in update.biases.values())
    update()  # nor later: its tokens are gone
    assert not any(bias.tensor.any() for bias in update.biases.values())
    model(input_ids=ids)
    update(torch.tensor(1.0))
    assert all(bias.tensor.any() for bias in update.biases.values())


def test_neither_padding_nor_evaluation_nor_recomputation_is_counted(group: Any) -> None:
    model, loads, _ = made("deepseek_v3")
    loads.tokens = Tokens()
    loads.tokens.set(torch.tensor([0] * 9 + [1] * 3), torch.tensor([1.0, 0.0]))
    ids = torch.randint(3, 90, (1, 12))
    model(input_ids=ids)
    top_k = model.config.num_experts_per_tok
    assert set(loads.read().sum(1).tolist()) == {9 * top_k}
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()(input_ids=ids)
    assert set(loads.read().sum(1).tolist()) == {9 * top_k}
    model.train()
    loads.reset()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(input_ids=ids).logits.sum().backward()
    assert set(loads.read().sum(1).tolist()) == {9 * top_k}


class _Sharded(SimpleNamespace):
    def clip(self, most: float | None) -> torch.Tensor:
        return torch.ones(())

    def updated(self) -> None:
        pass


def test_the_update_says_whether_a_step_was_taken() -> None:
    weight = nn.Parameter(torch.ones(2))
    said: list[Any] = []
    for scaled in (False, True):
        optimizer = torch.optim.SGD([weight], 0.1)
        scaler = LossScaler("cpu", LossScale(), enabled=scaled)
        sharded: Any = _Sharded(replication_factors=None, parameters={"weight": weight})
        update = OptimizerStep(sharded, optimizer, scaler, None, 0.0, then=said.append)
        for gradient, allowed in ((1.0, None), (float("inf"), None), (1.0, lambda norm: False)):
            weight.grad = torch.full((2,), gradient)
            update(allowed)
    plain, fp16 = said[:3], said[3:]
    assert plain == [True, True, False]  # without scaling an infinity is taken, and the guard ends the run
    assert [float(one) for one in fp16] == [1.0, 0.0, 0.0]
