"""Rows by an order, and norms of many tensors: against plain indexing and torch's norm."""

from __future__ import annotations

import pytest
import torch

from shardwise.nn.kernels.grouped import grouped_product
from shardwise.nn.kernels.multi_tensor_norm import norm_of_all
from shardwise.nn.kernels.rows import copied_again, copied_rows, summed_rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    return str(request.param)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width", "copies"), [(33, 64, 2), (7, 2880, 4), (5, 100, 1)])
def test_copies_and_sums(tokens: int, width: int, copies: int, dtype: torch.dtype, device: str) -> None:
    rows = torch.randn(tokens, width, device=device).to(dtype)
    order = torch.randperm(tokens * copies, device=device)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    copied = copied_rows(rows, order, copies)
    assert torch.equal(copied, rows[order // copies]) and torch.equal(copied_again(rows, order, copies), copied)
    back = summed_rows(copied, inverse, copies)
    assert (back.double() - copies * rows.double()).abs().max() <= (1e-6 if dtype == torch.float32 else 0.05)
    assert copied_rows(rows, order[:0], copies).shape == (0, width)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products(dtype: torch.dtype, device: str) -> None:
    rows, matrices = torch.randn(24, 32, device=device).to(dtype), torch.randn(3, 32, 16, device=device).to(dtype)
    ends = torch.tensor([8, 8, 24], dtype=torch.int32, device=device)
    out = grouped_product(rows, matrices, ends)
    wanted = torch.cat([rows[:8].double() @ matrices[0].double(), rows[8:].double() @ matrices[2].double()])
    assert (out - wanted).norm() <= 1e-2 * wanted.norm()
    each = grouped_product(rows.t(), out, ends)
    assert each.shape == (3, 32, 16) and not each[1].any()
    first = rows[:8].double().t() @ out[:8].double()
    assert (each[0] - first).norm() <= 1e-2 * first.norm()


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_the_norm_of_all(device: str) -> None:
    shapes = [(3,), (1000, 37), (1 << 17,), (5, 0), (64, 64)]
    tensors = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    tensors[-1] = tensors[-1].t()
    wanted = torch.cat([t.double().flatten() for t in tensors]).norm()
    assert float(norm_of_all(tensors)) == pytest.approx(float(wanted), rel=1e-5)
    assert torch.equal(norm_of_all(tensors), norm_of_all(tensors))
