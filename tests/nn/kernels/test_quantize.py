"""Block quantisation: error, bias, layout, and what does not fit into codes."""

from __future__ import annotations

import pytest
import torch

from shardwise.nn.kernels.quantize import (
    ALIGN,
    BLOCK,
    dequantize_into,
    packed_bytes,
    quantize,
    requantize_sum,
    sum_dequantized_into,
)

SIZES = [1, 2, 64, 65, 127, 128, 129, 1000, 512 * 128, 70_001]


def there_and_back(x: torch.Tensor, bits: int, seed: int | None = None) -> torch.Tensor:
    out = torch.full_like(x, float("inf"))
    dequantize_into(out, quantize(x, bits, seed), bits)
    return out


def heavy_tailed(*shape: int, seed: int = 0) -> torch.Tensor:
    """As gradients are: most of a block is far below its largest element."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made) * torch.randn(*shape, generator=made).abs() ** 2


def steps(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The distance of the two codes about each element."""
    blocks = [b.abs().amax(-1, keepdim=True).expand_as(b) for b in x.float().split(BLOCK, dim=-1)]
    least = torch.cat(blocks, -1) * (1 + 2**-7) / {4: 64, 8: 127}[bits]
    return least if bits == 8 else torch.maximum(least, x.abs())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", SIZES)
def test_error_is_half_a_step_and_at_random_a_whole_one(n: int, bits: int) -> None:
    x = heavy_tailed(3, n)
    assert ((there_and_back(x, bits) - x).abs() <= steps(x, bits) / 2 + 1e-7).all()
    assert ((there_and_back(x, bits, seed=5) - x).abs() <= steps(x, bits) + 1e-7).all()


@pytest.mark.parametrize(("bits", "per_element"), [(4, 0.5 + 2 / 128), (8, 1 + 2 / 128)])
def test_size_counts_the_scales(bits: int, per_element: float) -> None:
    n = 1 << 20
    assert packed_bytes(n, bits) == n * per_element
    for n in SIZES:
        assert packed_bytes(n, bits) % ALIGN == 0
        assert quantize(torch.ones(2, n), bits).shape == (2, packed_bytes(n, bits))


@pytest.mark.parametrize("bits", [4, 8])
def test_random_rounding_has_no_bias_and_rounding_to_nearest_has(bits: int) -> None:
    """The part of a gradient below half a step: lost for good to nearest, kept on average at random."""
    x = heavy_tailed(1, 8 * BLOCK)
    small = (x.abs() < steps(x, bits) / 2.05) & (x != 0)
    repeats = 400
    mean = sum(there_and_back(x, bits, seed) for seed in range(repeats)) / repeats
    nearest = there_and_back(x, bits)
    assert (nearest[small] == 0).all()
    # A rounded element is off by at most half a step in the mean square; the mean over 400 by a twentieth of that.
    off = ((mean - x) / steps(x, bits))[small]
    assert off.square().mean().sqrt() < 1.3 * 0.5 / repeats**0.5
    assert off.mean().abs() < 3 * 0.5 / (repeats * small.sum()) ** 0.5


def test_seeds_rows_and_blocks_round_differently() -> None:
    x = torch.full((2, 4 * BLOCK), 0.5)
    x[:, ::BLOCK] = 7.0
    a, b = there_and_back(x, 4, 1), there_and_back(x, 4, 2)
    assert not torch.equal(a, b) and torch.equal(a, there_and_back(x, 4, 1))
    blocks = a.view(8, BLOCK)
    assert len({tuple(row.tolist()) for row in blocks}) == 8


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_peers_and_packing_them_again(bits: int) -> None:
    n, peers, rows = 300, 3, 2
    x = heavy_tailed(peers, rows, n)
    packed = quantize(x, bits)
    plain = torch.empty_like(x)
    dequantize_into(plain, packed, bits)
    total = torch.empty(rows, n)
    sum_dequantized_into(total, packed, bits, factor=0.25)
    assert torch.allclose(total, plain.sum(0) * 0.25, atol=1e-6)
    for to in (4, 8):
        again = requantize_sum(packed, n, bits, to, 0.25, seed=9)
        assert torch.equal(again, quantize(total, to, seed=9)), "one pass or two, the same bytes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_types(dtype: torch.dtype) -> None:
    """Slices by place and then by node, read and written where they lie."""
    x = torch.randn(2, 3, 200).to(dtype)
    turned = quantize(x.transpose(0, 1), 8)
    assert torch.equal(turned, quantize(x.transpose(0, 1).contiguous(), 8))
    out = torch.empty_like(x)
    dequantize_into(out.transpose(0, 1), turned, 8)
    assert (out.float() - x.float()).abs().max() < 0.03


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_stays_so(bad: float, bits: int) -> None:
    """Loss scaling skips a step by it. Only the block that it is in is lost."""
    x = torch.randn(1, 3 * BLOCK)
    x[0, BLOCK + 5] = bad
    out = there_and_back(x, bits, seed=1)
    assert not out[0, BLOCK + 5].isfinite()
    assert out[0, :BLOCK].isfinite().all() and out[0, 2 * BLOCK :].isfinite().all()


def test_zeros_and_tiny_numbers() -> None:
    assert (there_and_back(torch.zeros(1, 200), 4, seed=1) == 0).all()
    tiny = torch.full((1, BLOCK), 1e-30)
    assert torch.allclose(there_and_back(tiny, 8), tiny, rtol=0.01)
    assert quantize(torch.empty(2, 0), 8).shape == (2, 0)
