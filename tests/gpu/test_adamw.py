"""The fused AdamW kernels against their plain references."""

from __future__ import annotations

import pytest
import torch

from shardwise.nn.kernels.multi_tensor_norm import norm_of_all
from shardwise.optim.codecs import FIRST, SECOND, StoredState
from shardwise.optim.kernels.split_adamw import split_adamw, split_adamw_reference, split_adamw_together
from shardwise.optim.rules import Hyper
from shardwise.optim.split_master import join, split_

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
    from shardwise.optim.kernels import coded_adamw as fused

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
        fused.adamw(high, gradient, *map(StoredState, codecs, both[0], (11, 12)), 640, hyper, low, scale)
        fused.adamw(master, gradient.float() * 0.5, *map(StoredState, codecs, both[1], (11, 12)), 640, hyper)
    torch.testing.assert_close(join(high, low), master, rtol=1e-6, atol=1e-8)
    for ours, plain in zip(*both, strict=True):
        for name in ours:
            # Multiplying by the scale may be contracted into the sum that follows, so a last bit may differ.
            a, b = ours[name], plain[name]
            if a.is_floating_point():
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
            else:
                assert (a != b).float().mean() < 1e-3


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
def test_many_in_one_launch_are_the_same_as_one_by_one(kind: torch.dtype, scaled: bool, shift: int) -> None:
    """Equal to the bit, and nothing beside the tensors is written."""
    hyper, scale = Hyper(1e-3, (0.9, 0.95), 1e-8, 0.1, 7), torch.tensor(0.5, device="cuda") if scaled else None
    sizes, at, rows, expected, gradients = [1, 63, 1024, 1025, 70000], 64, [], [], []
    highs = [torch.randn(n + shift, device="cuda").bfloat16()[shift:] for n in sizes]
    blob = torch.zeros(10 * sum(sizes) + 64 * 64, dtype=torch.uint8, device="cuda")
    for high in highs:
        n, row = high.numel(), []
        for width, dtype in ((2, torch.int16), (4, torch.float32), (4, torch.float32)):
            part = blob[at : at + width * n].view(dtype)
            part.copy_(torch.randint(-99, 99, (n,), device="cuda") if width == 2 else torch.rand(n, device="cuda"))
            row, at = [*row, at], at + -(-width * n // 64) * 64
        rows.append([n, *row])
        gradients.append(torch.randn(n + shift, device="cuda", dtype=kind)[shift:])
    alone = blob.clone()
    for high, (n, *places), gradient in zip(highs, rows, gradients, strict=True):
        kinds = (torch.int16, torch.float32, torch.float32)
        low, mean, square = (alone[p : p + n * k.itemsize].view(k) for p, k in zip(places, kinds, strict=True))
        weight = high.clone()
        split_adamw(weight, low, gradient, mean, square, scale, hyper)
        expected.append(weight)
    split_adamw_together(highs, blob, torch.tensor(rows, device="cuda"), gradients, scale, hyper)
    assert torch.equal(blob, alone)
    for high, weight in zip(highs, expected, strict=True):
        apart = (high.view(torch.int16) != weight.view(torch.int16)).nonzero().flatten()
        assert not len(apart), (len(high), apart[:4], high[apart[:4]], weight[apart[:4]])


@pytest.mark.parametrize("kinds", [[torch.bfloat16], [torch.float32], [torch.bfloat16, torch.float32, torch.float16]])
def test_the_norm_of_many(kinds: list[torch.dtype]) -> None:
    sizes = [1, 63, 16384, 16385, 300000]
    tensors = [torch.randn(n + 1, device="cuda", dtype=kind)[i % 2 :] for kind in kinds for i, n in enumerate(sizes)]
    exact = torch.cat([t.double() for t in tensors]).norm()
    assert abs(norm_of_all(tensors) / exact - 1) < 1e-6
