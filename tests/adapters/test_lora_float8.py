"""LoRA over a base in fp8: near the same layer with its weight in floats; what is learned is not rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import LLAMA, saved_model, tiny_run
from torch import nn

from shardwise.adapters.layers import attach_lora, multiply_bases_in_float8
from shardwise.adapters.quantized import dequantized, quantize_linears
from shardwise.trainer import Trainer


def a_layer(inside: int, outside: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inside, outside)).requires_grad_(False)
    quantize_linears(model, lambda *_: True, "fp8")
    attach_lora(model[0], (inside, outside), 4, 0.7)
    multiply_bases_in_float8(model, torch.device("cpu"))
    layer: Any = model[0]
    for parameter in (layer.lora_A, layer.lora_B):
        nn.init.normal_(parameter, 0, 0.25)
    return layer


def apart(found: Any, right: Any) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize(("inside", "outside", "rounded"), [(64, 96, True), (64, 90, False), (72, 96, False)])
def test_a_layer_and_its_gradients(inside: int, outside: int, rounded: bool) -> None:
    layer = a_layer(inside, outside)
    x = torch.randn(3, 10, inside)
    x[1] *= 50  # an outlier costs its own rows alone
    weight = dequantized(layer)
    a, b = (p.detach().clone().requires_grad_() for p in (layer.lora_A, layer.lora_B))
    given, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = layer(given)
    wanted = plain @ weight.t() + layer.bias + 0.7 * (plain @ a.t()) @ b.t()
    slope = torch.randn_like(out)
    out.backward(slope)
    wanted.backward(slope)
    for row in range(3):
        found = apart(out[row], wanted[row]), apart(given.grad[row], plain.grad[row])  # type: ignore[index]
        assert all(1e-3 < f < 0.04 for f in found) if rounded else max(found) < 1e-5, found
    assert apart(layer.lora_A.grad, a.grad) < 1e-5 and apart(layer.lora_B.grad, b.grad) < 1e-5
    with torch.no_grad():
        assert apart(layer.eval()(x), wanted) < 1e-5  # evaluated is what is handed over


def test_a_gpu_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = a_layer(64, 96), torch.randn(10, 64)
    wanted = x @ dequantized(layer).t() + layer.bias + 0.7 * (x @ layer.lora_A.t()) @ layer.lora_B.t()
    assert layer.base_in_float8 and apart(layer(x), wanted) > 1e-3
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    multiply_bases_in_float8(layer, torch.device("cuda", 0))
    assert not layer.base_in_float8 and apart(layer(x), wanted) < 1e-5


def losses(tmp: Path, model: str, **changes: Any) -> list[float]:
    usual = {"train__steps": 8, "train__learning_rate": 1e-2, "train__schedule": "constant", "precision": "fp32"}
    rows = Trainer(tiny_run(tmp, model, **(usual | changes))).fit().metrics
    return [row["loss"] for row in rows if row["kind"] == "train"]


def test_it_learns_as_in_floats(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model", LLAMA)
    plain = losses(tmp_path / "lora", model, method={"type": "lora", "rank": 4})
    found = losses(tmp_path / "fp8", model, method={"type": "qlora", "rank": 4, "bits": "fp8"})
    assert found != plain and found == pytest.approx(plain, rel=5e-3) and found[-1] < found[0] - 0.05


@pytest.mark.slow
def test_stage_3_and_recomputation_change_nothing(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "model", LLAMA)
    method = {"type": "qlora", "rank": 4, "bits": "fp8"}
    one = losses(tmp_path / "one", model, method=method, train__batch_size=4, train__micro_batch_size=2)
    changes = {"ranks": 2, "parallel__zero": 3, "recompute": "full"}
    two = losses(tmp_path / "two", model, method=method, train__batch_size=4, train__micro_batch_size=2, **changes)
    assert two == pytest.approx(one, rel=1e-5)
