"""Both layouts of a matrix in 8 bits: the same values as rounding in plain steps, zeros where it is made longer."""

from __future__ import annotations

import pytest
import torch

from shardwise.nn.kernels.float8 import BACKWARD, FORWARD, cast, scale_of
from shardwise.nn.kernels.transposed_round import round_both, round_transposed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
@pytest.mark.parametrize("shape", [(64, 96), (51, 80), (300, 272), (1, 16)])
def test_both_layouts(shape: tuple[int, int], kind: torch.dtype, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).bfloat16()
    scale = scale_of(x, kind)
    wanted = cast(x, scale, kind)
    rows, turned = round_both(x, scale.reciprocal(), kind)
    alone = round_transposed(x, scale.reciprocal(), kind)
    assert rows.is_contiguous() and turned.is_contiguous() and turned.shape[1] % 16 == 0
    assert torch.equal(rows.float(), wanted.float())
    for one in (turned, alone):
        assert torch.equal(one[:, : shape[0]].t().float(), wanted.float())
        assert not one[:, shape[0] :].float().any()


@pytest.mark.parametrize("device", DEVICES)
def test_part_of_a_wider_matrix(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    wide = torch.randn(48, 160, device=device).bfloat16()
    x, one = wide[:, 32:96], torch.ones((), device=device)
    rows, turned = round_both(x, one, FORWARD)
    assert torch.equal(rows.float(), x.to(FORWARD).float()) and torch.equal(turned.t().float(), rows.float())
    over = round_both(x.t(), one, FORWARD)  # no row is contiguous: the plain way
    assert torch.equal(over[0].float(), turned[:, :48].float())
