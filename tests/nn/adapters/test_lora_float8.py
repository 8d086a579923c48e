"""LoRA over a base in fp8: near the same layer with its weight in floats; what is learned is not rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import LLAMA, saved_model, tiny_run
from torch import nn

from shardwise.config.methods import Qlora
from shardwise.core.errors import UserError
from shardwise.launch.trainer import Trainer
from shardwise.nn.adapters.layers import attach_lora, multiply_bases_in_float8
from shardwise.nn.adapters.quantized import dequantized, quantize_linears
from shardwise.nn.kernels.nf4 import Bits, RowFormat, as_float8, dequantize, float8_scales, quantize


def a_layer(inside: int, outside: int, bits: Bits = "fp8", double: bool = True, wanted: str = "auto") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inside, outside)).requires_grad_(False)
    quantize_linears(model, lambda *_: True, bits, double)
    attach_lora(model[0], (inside, outside), 4, 0.7)
    multiply_bases_in_float8(model, torch.device("cpu"), wanted)
    layer: Any = model[0]
    for parameter in (layer.lora_A, layer.lora_B):
        nn.init.normal_(parameter, 0, 0.25)
    return layer


def apart(found: Any, right: Any) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize(("inside", "outside", "rounded"), [(64, 96, True), (64, 90, False), (72, 96, False)])
@pytest.mark.parametrize(("bits", "double"), [("fp8", True), ("nf4", True), ("nf4", False)])
def test_a_layer_and_its_gradients(bits: Bits, double: bool, inside: int, outside: int, rounded: bool) -> None:
    if not rounded:
        with pytest.raises(UserError, match="multiples of 16"):
            a_layer(inside, outside, bits, double, "fp8")
    layer = a_layer(inside, outside, bits, double, "fp8" if rounded else "auto")
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
        assert all(1e-3 < f < (0.04 if bits == "fp8" else 0.06) for f in found) if rounded else max(found) < 1e-5, found
    assert apart(layer.lora_A.grad, a.grad) < 1e-5 and apart(layer.lora_B.grad, b.grad) < 1e-5
    with torch.no_grad():
        assert apart(layer.eval()(x), wanted) < 1e-5  # evaluated is what is handed over


@pytest.mark.parametrize(("bits", "wanted", "rounded"), [
    ("fp8", "auto", True), ("fp8", "plain", False), ("nf4", "auto", False), ("nf4", "fp8", True),
])  # fmt: skip
def test_what_is_wanted(bits: Bits, wanted: str, rounded: bool) -> None:
    assert a_layer(64, 96, bits, True, wanted).base_in_float8 is rounded


@pytest.mark.parametrize("double", [True, False])
def test_nf4_as_fp8(double: bool) -> None:
    form, x = RowFormat(200, "nf4", double), torch.randn(48, 200) * torch.rand(48, 1).exp()
    x[7] = 0
    packed = quantize(x, form)
    weight, scales = as_float8(packed, form)
    exact = dequantize(packed, form, torch.float32)
    error = (weight.float() * scales - exact).abs()
    assert (error <= 2**-4 * exact.abs() + scales * 2**-9).all() and error.norm() <= 0.04 * exact.norm()
    assert torch.equal(scales, float8_scales(packed, form)) and weight.float().abs().max() > 400


@pytest.mark.parametrize("more", [{"bits": "int8"}, {"dropout": 0.1}, {"dora": True}])
def test_what_does_not_go_with_it(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not go with"):
        Qlora(multiply="fp8", **more)


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
