"""What is here under DeepSpeed's names, and that what is not says so."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise.deepspeed as deepspeed
from shardwise.core.errors import UserError
from shardwise.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from shardwise.deepspeed.optimizers import configured
from shardwise.deepspeed.refused import REFUSED
from shardwise.deepspeed.runtime import lr_schedules
from shardwise.deepspeed.runtime.zero.stage3 import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_live,
)
from shardwise.deepspeed.runtime.zero.stage_1_and_2 import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
)
from shardwise.deepspeed.settings import read_config, settle

SCHEDULES = json.loads((Path(__file__).parents[1] / "optim/deepspeed_reference.json").read_text())


@pytest.mark.parametrize("name", ["PipelineModule", "init_inference", "moe", "DeepSpeedHybridEngine", "OnDevice"])
def test_what_is_not_here_says_so(name: str) -> None:
    with pytest.raises(UserError, match=rf"deepspeed\.{name}: is not supported"):
        getattr(deepspeed, name)


def test_typos_are_typos() -> None:
    with pytest.raises(AttributeError):
        deepspeed.initialise  # noqa: B018
    with pytest.raises(UserError, match="TiledLinear"):
        deepspeed.zero.TiledLinear  # noqa: B018
    assert not REFUSED.keys() & {*deepspeed.__all__, *dir(deepspeed.utils)}


def test_arguments() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert args.deepspeed and args.deepspeed_config == "x.json"


@pytest.mark.parametrize("case", SCHEDULES["schedules"], ids=lambda c: c["type"])
def test_schedules_equal_deepspeeds(case: dict[str, Any]) -> None:
    """Every rate and momentum that DeepSpeed's own scheduler set."""

    def build() -> Any:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=SCHEDULES["peak"], betas=(0.9, 0.99))
        return getattr(lr_schedules, case["type"])(optimizer, **case["params"])

    scheduler, again = build(), build()
    optimizer = scheduler.optimizer
    rates, momenta = [], []
    for _ in range(SCHEDULES["updates"]):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"][0])
        scheduler.step()
    assert rates == pytest.approx(case["rates"], abs=1e-12)
    assert momenta == pytest.approx(case["momenta"], abs=1e-12)
    again.load_state_dict(scheduler.state_dict())
    assert again.get_last_lr() == scheduler.get_last_lr()


def test_schedule_per_group() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups)
    scheduler = lr_schedules.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    for _ in range(3):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.1, 0.2]


@pytest.mark.parametrize("kind", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(kind: type, decoupled: bool) -> None:
    flag = "adam_w_mode" if kind is FusedAdam else "adamw_mode"
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    plain = torch.optim.AdamW if decoupled else torch.optim.Adam
    one, other = kind([ours], lr=0.1, weight_decay=0.5, **{flag: decoupled}), plain([theirs], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        ours.grad = theirs.grad = torch.tensor([1.0, -2.0, 0.5])
        one.step()
        other.step()
    assert torch.equal(ours, theirs)


def test_optimizer_of_the_config() -> None:
    weight = [nn.Parameter(torch.ones(2))]
    adam = configured({"optimizer": {"type": "Adam", "params": {"lr": 0.5, "torch_adam": True}}}, weight)
    assert isinstance(adam, torch.optim.AdamW) and adam.param_groups[0]["decoupled_weight_decay"]
    assert isinstance(configured({"optimizer": {"type": "SGD", "params": {"lr": 1}}}, weight), torch.optim.SGD)
    assert configured({}, weight) is None
    for block, problem in (
        ({"type": "OneBitAdam"}, "not supported"),
        ({"type": "Adem"}, "not known"),
        ({"type": "AdamW", "params": {"learning_rate": 1}}, "does not have it"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1}}, "gradient_clipping"),
    ):
        with pytest.raises(UserError, match=problem):
            configured({"optimizer": block}, weight)


def test_config_is_read_and_settled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
                                "zero_optimization": {"stage": 3}, "wall_clock_breakdown": True,
                                "csv_monitor": {"enabled": True, "output_path": "x"}}))  # fmt: skip
    values = read_config(None, SimpleNamespace(deepspeed_config=str(file)))
    settled = settle(values, 2)
    assert (settled.batch.train, settled.batch.micro, settled.batch.accumulate) == (8, 2, 2)
    assert settled.engine["parallel"]["zero"] == 3 and settled.engine["precision"] == "bf16"
    assert settled.engine["max_grad_norm"] is None, "DeepSpeed does not clip unless told to"
    assert settled.engine["breakdown"]
    assert any(row[0].startswith("csv_monitor") and row[1] == "no effect" for row in settled.account)
    with pytest.raises(UserError, match="given besides"):
        read_config({}, SimpleNamespace(deepspeed_config=str(file)))
    with pytest.raises(UserError, match="is missing"):
        read_config(None, None)
    with pytest.raises(UserError, match="no such file"):
        read_config(str(tmp_path / "none.json"), None)
    with pytest.raises(UserError, match="is not train_micro"):
        settle({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, 2)
    with pytest.raises(UserError, match="not decided"):
        settle({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"}, 2)
    with pytest.raises(UserError, match="unknown key"):
        settle({"train_batch_size": 8, "zero_optimisation": {}}, 2)


def test_estimators(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed's own figures, where its users import them from; test_published.py has all rows."""
    assert estimate_zero2_model_states_mem_needs(1000, 4, 2, cpu_offload=False) == (24000, 4000 + 16 * 125)
    host, device, layer = estimate_zero3_model_states_mem_needs(1000, 100, 4, 2, cpu_offload=False, zero_init=True)
    assert (host, device, layer) == (2400, 400 + 18 * 125, 400)
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 20, bias=False))
    estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=2)
    estimate_zero2_model_states_mem_needs_all_cold(10**9, 8)
    shown = capsys.readouterr().out
    assert shown.count("offload_param=cpu") == 2 and "1000M total params" in shown


def test_checkpointing() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    deepspeed.checkpointing.configure(None, deepspeed_config="ds.json")
    deepspeed.checkpointing.checkpoint(layer, x).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, layer.weight.sum(0).expand(2, 4))
    with pytest.raises(UserError, match="checkpoint_in_cpu"):
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
