"""The fused AdamW kernels against their plain references."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.adamw import coded_adamw, split_adamw, split_adamw_reference
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


@pytest.mark.parametrize("split", [False, True])
def test_coded_adamw(split: bool) -> None:
    shape = (333, 512)
    master, high, low = masters(shape)
    first, second = FIRST["8bit"], SECOND["8bit"]
    stored = []
    for codec, value in (
        (first, torch.randn(shape, device="cuda") * 1e-3), (second, torch.rand(shape, device="cuda") ** 8 * 1e-6)
    ):  # fmt: skip
        parts = {k: torch.zeros(s, dtype=d, device="cuda") for k, (s, d) in codec.shapes(shape).items()}
        codec.encode(value, parts, 1)
        stored.append(parts)
    gradient = torch.randn(shape, device="cuda") * 1e-3
    hyper, offset = Hyper(1e-3, (0.9, 0.95), 1e-8, 0.1, 7), 5 * 512
    mean, square = first.decode(stored[0], shape), second.decode(stored[1], shape)
    expected_weight = master.clone()
    torch._fused_adamw_(
        [expected_weight], [gradient], [mean], [square], [], [torch.tensor(7.0, device="cuda")], lr=1e-3, beta1=0.9,
        beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    expected = [{k: v.clone() for k, v in parts.items()} for parts in stored]
    first.encode(mean, expected[0], 11, offset)
    second.encode(square, expected[1], 12, offset)
    assert coded_adamw(
        high if split else master, low if split else None, gradient, *stored, None, hyper, (11, 12), offset
    )
    torch.testing.assert_close(join(high, low) if split else master, expected_weight, rtol=3e-6, atol=1e-8)
    for parts, right in zip(stored, expected, strict=True):
        torch.testing.assert_close(parts["scales"], right["scales"], rtol=1e-6, atol=0)
        wrong = (parts["codes"].int() - right["codes"].int()).abs()
        assert wrong.max() <= 1 and (wrong > 0).float().mean() < 1e-3, "codes differ beyond the last bit of arithmetic"
