"""What the settings mean for a model, and what is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from shardwise.config.schema import Run
from shardwise.core.errors import UserError
from shardwise.parallel.routers.find import RouterModules, Routers
from shardwise.parallel.routers.settings import Chosen, choose, describe_choice

SITE = RouterModules("Gate", "layers.*.gate", 0)
MIXTRAL = Routers((SITE,), 2, 0.01, False, "", {})
DEEPSEEK = Routers((SITE,), 8, None, False, "", {"layers.*.experts": "layers.*.gate.bias"})


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(2, 2).weight.detach())


def model(trained: bool = True) -> nn.Module:
    made = nn.Module()
    block = nn.Module()
    block.gate = Gate()
    made.layers = nn.ModuleList([block])
    return made.requires_grad_(trained)


def run(**router: Any) -> Run:
    return Run.model_validate({"model": "m", "data": {"train": "x"}, "router": router})


def chosen(found: Routers | None, trained: bool = True, **router: Any) -> Chosen:
    return choose(run(**router), found, model(trained))


def test_left_open() -> None:
    assert chosen(None) == Chosen(0.0, 0.0, 0.0)
    silent = chosen(MIXTRAL)
    assert silent.aux_loss == 0.0 and "does not ask for it" in silent.why["aux_loss"]
    default = chosen(replace(MIXTRAL, enabled=True))
    assert default.aux_loss == 0.01 and "output_router_logits: true" in default.why["aux_loss"]
    # The config asks, and the class's own loss has nothing for it.
    idle = chosen(replace(MIXTRAL, enabled=True, coefficient=None))
    assert idle.aux_loss == 0.0 and "its own code adds no loss" in idle.why["aux_loss"]


def test_biases_left_open() -> None:
    assert chosen(DEEPSEEK).bias_update == 1e-3
    frozen = chosen(DEEPSEEK, trained=False)
    assert frozen.bias_update == 0.0 and frozen.why["bias_update"] == "the routers are frozen"
    adapter = Run.model_validate({"model": "m", "data": {"train": "x"}, "method": "lora"})
    assert choose(adapter, DEEPSEEK, model()).bias_update == 0.0
    apart = Run.model_validate({"model": "m", "data": {"train": "x"}, "diloco": {"server": "h:1"}})
    assert choose(apart, DEEPSEEK, model()).bias_update == 0.0


def test_numbers() -> None:
    assert chosen(MIXTRAL, aux_loss=0.5, z_loss="1e-3") == Chosen(0.5, 0.001, 0.0)
    assert chosen(replace(MIXTRAL, enabled=True), aux_loss=0) == Chosen(0.0, 0.0, 0.0)
    assert chosen(DEEPSEEK, bias_update=0.02, aux_loss=0.1).bias_update == 0.02


BROKEN = replace(MIXTRAL, enabled=True, coefficient=None, trouble="transformers' own code fails to compute it (…)")


@pytest.mark.parametrize(
    ("found", "settings", "field", "words"),
    [
        (None, {"aux_loss": 0.1}, "router.aux_loss", "no routers are found"),
        (None, {"z_loss": 0.1}, "router.z_loss", "no routers are found"),
        (MIXTRAL, {"bias_update": 0.1}, "router.bias_update", "no bias that decides"),
        (replace(MIXTRAL, top_k=0), {"aux_loss": 0.1}, "router.aux_loss", "how many experts"),
        (MIXTRAL, {"balance": "micro_batch"}, "advanced.router.balance", "there is none"),
        (BROKEN, {}, "router.aux_loss", "own code fails"),
    ],
)
def test_refused(found: Routers | None, settings: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        chosen(found, **settings)
    assert error.value.field == field
    if found is BROKEN:  # what to do is said, and does it
        assert "router.aux_loss: 0" in error.value.remedy
        assert chosen(BROKEN, aux_loss=0).aux_loss == 0.0 and chosen(BROKEN, aux_loss=0.3).aux_loss == 0.3


def test_one_line() -> None:
    assert describe_choice(chosen(None), "document") == ""
    line = describe_choice(chosen(replace(MIXTRAL, enabled=True), z_loss=0.1), "document")
    assert line == (
        "auxiliary loss × 0.01 over each document (the model's config asks for it (output_router_logits: true)); "
        "z-loss × 0.1"
    )
    line = describe_choice(chosen(DEEPSEEK), "document")
    assert line == "bias moves by 0.001 a step (the model balances its routers by a bias)"
    assert "each micro-batch" in describe_choice(chosen(MIXTRAL, aux_loss=1.0), "micro_batch")
