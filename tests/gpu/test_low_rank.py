"""The kernel that adds a low-rank product, and LoRA as one operator, against plain steps on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.adapters.layers import attach_lora
from shardwise.adapters.quantized import dequantized, quantize_linears
from shardwise.kernels.low_rank import add_low_rank_

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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_and_its_gradients(packed: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384, bias=True)).cuda().bfloat16().requires_grad_(False)
    if packed:
        quantize_linears(model, lambda name, module: True)
    attach_lora(model[0], (256, 384), 16, 0.7)
    layer = model[0]
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
    wanted = z @ weight.t() + layer.bias.double() + 0.7 * (z @ a.t()) @ b.t()
    wanted.backward(gradient.double())
    pairs = {
        "y": (y, wanted),
        "x": (x.grad, z.grad),
        "a": (layer.lora_A.grad, a.grad),
        "b": (layer.lora_B.grad, b.grad),
    }
    for name, (found, right) in pairs.items():
        assert found is not None and right is not None
        assert (found.double() - right).norm() <= 0.01 * right.norm(), name
