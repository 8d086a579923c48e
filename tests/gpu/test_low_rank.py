"""The kernel that adds a low-rank product, and LoRA as one operator, against plain steps on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.nn.adapters.layers import attach_lora, multiply_bases_in_float8
from shardwise.nn.adapters.quantized import dequantized, quantize_linears
from shardwise.nn.kernels.low_rank import add_low_rank_, scale_and_add_low_rank_
from shardwise.nn.kernels.nf4 import Bits
from shardwise.nn.kernels.transpose import transposed_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("rank", [4, 16, 64])
@pytest.mark.parametrize("shape", [(1, 8), (33, 130), (257, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adds_in_place(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(rank)
    options = {"device": "cuda", "generator": generator}
    y, low = torch.randn(shape, **options).to(dtype), torch.randn(shape[0], rank, **options).to(dtype)
    for b in (torch.randn(shape[1], rank, **options).to(dtype), torch.randn(rank, shape[1], **options).to(dtype).t()):
        wanted = y.double() + 0.5 * low.double() @ b.double().t()
        found = y.clone()
        add_low_rank_(found, low, b, 0.5)
        bound = 1e-5 if dtype == torch.float32 else 2**-8
        assert ((found.double() - wanted).abs() <= bound * wanted.abs() + 1e-3).all()


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("rank", [4, 16])
def test_scales_and_adds(rank: int, columns: bool) -> None:
    y, low, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((33, 130), (33, rank), (130, rank)))
    by_row, by_column = torch.rand(33, 1, device="cuda"), torch.rand(130, 3, device="cuda")[:, :1]
    wanted = y.double() * by_row * (by_column.view(1, -1) if columns else 1) + 0.5 * low.double() @ b.double().t()
    found = scale_and_add_low_rank_(y.clone(), by_row, by_column if columns else None, low, b, 0.5)
    assert ((found.double() - wanted).abs() <= 2**-7 * wanted.abs() + 1e-2).all()


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (300, 1000), (4096, 14336)])
def test_turns_bytes_over(shape: tuple[int, int]) -> None:
    x = torch.randint(-128, 128, (shape[0], shape[1] + 16), device="cuda", dtype=torch.int8)[:, : shape[1]]
    assert torch.equal(transposed_bytes(x), x.t())


@pytest.mark.parametrize(("packed", "wanted"), [(None, "auto"), ("nf4", "auto"), ("fp8", "auto"), ("nf4", "fp8")])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_and_its_gradients(packed: Bits | None, wanted: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384, bias=True)).cuda().bfloat16().requires_grad_(False)
    if packed:
        quantize_linears(model, lambda name, module: True, packed)
    attach_lora(model[0], (256, 384), 16, 0.7)
    layer = model[0]
    multiply_bases_in_float8(model, torch.device("cuda"), wanted)
    layer.lora_A.data, layer.lora_B.data = (torch.randn_like(p).bfloat16() / 16 for p in (layer.lora_A, layer.lora_B))
    x, gradient = (
        torch.randn(2, 3, 65, 256, device="cuda").bfloat16(),
        torch.randn(3, 65, 384, device="cuda").bfloat16(),
    )
    x = x[0].requires_grad_()
    y = (torch.compile(layer.forward, fullgraph=True) if compiled else layer)(x)
    y.backward(gradient)
    weight = (dequantized(layer, torch.bfloat16) if packed else layer.weight).double()
    a, b = (p.detach().double().requires_grad_() for p in (layer.lora_A, layer.lora_B))
    z = x.detach().double().requires_grad_()
    right_one = z @ weight.t() + layer.bias.double() + 0.7 * (z @ a.t()) @ b.t()
    right_one.backward(gradient.double())
    pairs = {
        "y": (y, right_one),
        "x": (x.grad, z.grad),
        "a": (layer.lora_A.grad, a.grad),
        "b": (layer.lora_B.grad, b.grad),
    }
    for name, (found, right) in pairs.items():
        assert found is not None and right is not None
        rounded = "fp8" in (packed, wanted) and name in "xy"  # inputs in 8 bits; what is learned is not
        assert (found.double() - right).norm() <= (0.05 if rounded else 0.01) * right.norm(), name
