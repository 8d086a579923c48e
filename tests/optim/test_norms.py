"""Norms of large gradients: right in fp32, and the same however the gradient is divided."""

from __future__ import annotations

import pytest
import torch
from support import zeror
from support.ranks import run_ranks

from shardwise.optim.norms import norm_of


@pytest.mark.parametrize("shape", [(49152, 64), (3,), (0, 64), (), (1024,), (5, 7, 3001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_right(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    exact = values.double().square().sum().sqrt().item()
    assert norm_of(values).item() == pytest.approx(exact, rel=3e-7)
    if shape == (49152, 64) and dtype == torch.float32:
        plain = torch.linalg.vector_norm(values).item()
        assert abs(plain / exact - 1) > 1e-5, "torch adds up exactly by now: norms.py can go"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_shows(value: float) -> None:
    tensor = torch.zeros(5000)
    tensor[4321] = value
    assert not norm_of(tensor).isfinite()


def test_the_stage_does_not_change_it() -> None:
    """One gradient on two ranks, whole and divided: the same norm, before and after the clipping."""
    found = {stage: run_ranks(zeror.norm_at_stage, 2, stage) for stage in (0, 2)}
    exact = found[0][0]["exact"]
    for ranks in found.values():
        for result in ranks:
            assert result["norm"] == pytest.approx(exact, rel=3e-7)
            assert result["eager"] == pytest.approx(exact, rel=3e-7)
            assert result["clipped"] == pytest.approx(0.5, rel=1e-5)
