"""Sums of products in fp32, of factors in fewer bits."""

from __future__ import annotations

import pytest
import torch

from shardwise.nn.kernels.add_product import add_product_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adds(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((48, 24), (48, 32)))
    total = torch.ones(24, 32, device=device)
    for _ in range(3):
        add_product_(total, left.t(), right)
    wanted = 1 + 3 * left.double().t() @ right.double()
    assert (total - wanted).norm() <= (1e-6 if dtype == torch.float32 else 4e-3) * wanted.norm()
