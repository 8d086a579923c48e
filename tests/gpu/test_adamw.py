"""The fused AdamW kernels against their plain references."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.adamw import split_adamw, split_adamw_reference
from shardwise.optim.codecs import FIRST, SECOND
from shardwise.optim.rules import Hyper
from shardwise.zero.master import join, split_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def masters(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random master and its halves."""
    master = torch.randn(shape, device="cuda") * 0.02
    high = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    low = torch.empty(shape, device="cuda", dtype=torch.int16)
    split_(master.clone(), high, low)
    return master, high, low


@pytest.mark.parametrize("scaled", [False, True])
def test_split_adamw(scaled: bool) -> None:
    shape = (1000, 257)
    _, high, low = masters(shape)
    mean, square = torch.randn(shape, device="cuda") * 1e-3, torch.rand(shape, device="cuda") * 1e-6
    gradient = (torch.randn(shape, device="cuda") * 1e-3).bfloat16()
    scale = torch.tensor(0.5, device="cuda") if scaled else None
    expected = [t.clone() for t in (high, low, mean, square)]
    hyper = Hyper(1e-3, (0.9, 0.95), 1e-8, 0.1, 7)
    split_adamw_reference(expected[0], expected[1], gradient, expected[2], expected[3], scale, hyper)
    split_adamw(high, low, gradient, mean, square, scale, hyper)
    torch.testing.assert_close(join(high, low), join(expected[0], expected[1]), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(mean, expected[2], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(square, expected[3], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
@pytest.mark.parametrize("shape", [(333, 512), (70, 300)])
def test_coded_adamw_on_split_masters(kind: str, shape: tuple[int, int]) -> None:
    """The fused kernel on halves equals the same kernel on whole masters, apart from the split."""
    from shardwise.optim import fused

    master, high, low = masters(shape)
    codecs = FIRST[kind], SECOND[kind]
    gradient = (torch.randn(shape, device="cuda") * 1e-3).bfloat16()
    scale = torch.tensor(0.5, device="cuda")
    both = [
        [{k: torch.zeros(s, dtype=d, device="cuda") for k, (s, d) in c.shapes(shape).items()} for c in codecs]
        for _ in range(2)
    ]
    for step in range(1, 4):
        hyper = Hyper(1e-3, (0.9, 0.95), 1e-8, 0.1, step)
        fused.adamw(high, gradient, *both[0], codecs, (11, 12), 640, hyper, low, scale)
        fused.adamw(master, gradient.float() * 0.5, *both[1], codecs, (11, 12), 640, hyper)
    torch.testing.assert_close(join(high, low), master, rtol=1e-6, atol=1e-8)
    for ours, plain in zip(*both, strict=True):
        for name in ours:
            # Multiplying by the scale may be contracted into the sum that follows, so a last bit may differ.
            a, b = ours[name], plain[name]
            if a.is_floating_point():
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
            else:
                assert (a != b).float().mean() < 1e-3
