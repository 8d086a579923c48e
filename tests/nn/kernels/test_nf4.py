"""Rows of few bits: how far a round trip may move a weight, what lies where, and the same numbers as bitsandbytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shardwise.nn.kernels.nf4 import BLOCK, LEVELS, Bits, RowFormat, dequantize, quantize

WIDEST = max(b - a for a, b in pairwise(LEVELS)) / 2  # half of the largest gap between levels
FORMS: list[tuple[Bits, bool]] = [("nf4", True), ("nf4", False), ("int8", False), ("fp8", False)]
COLUMNS = [1, 48, 64, 65, 576, 2050]


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """Each weight's block maximum, by a plain loop over blocks."""
    return torch.cat([b.abs().amax(1, keepdim=True).expand_as(b) for b in x.split(BLOCK, 1)], 1)


def round_trip(x: torch.Tensor, form: RowFormat) -> torch.Tensor:
    return dequantize(quantize(x, form), form, torch.float32)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("bits", "double"), FORMS)
def test_error_is_bounded(bits: Bits, double: bool, columns: int) -> None:
    x = weights(37, columns)
    moved = (round_trip(x, RowFormat(columns, bits, double)) - x).abs()
    if bits == "int8":
        assert (moved <= x.abs().amax(1, keepdim=True) / 254 * 1.0001).all()
        return
    if bits == "fp8":  # half of the last of three bits; below the least exponent, half of its step
        least = x.abs().amax(1, keepdim=True) / 448 * 2**-10
        assert (moved <= torch.maximum(x.abs() / 16, least) * 1.0001).all()
        return
    scales = scales_of(x)
    spread = (scales.amax(1) / scales.amin(1)).log2()
    # Half a step of the bytes; fp16 rounds `low` and `step` outwards, which widens the spread a little.
    loss = 2 ** ((spread + 0.02) / 510 * 1.01) - 1 if double else torch.zeros(37)
    assert (moved <= (WIDEST + loss[:, None]) * scales * 1.00001).all()


@pytest.mark.parametrize("double", [True, False])
def test_codes_are_the_nearest_levels(double: bool) -> None:
    """Against a plain search over all 16 levels."""
    x = weights(8, 256)
    exact = x / scales_of(x)
    nearest = torch.tensor(LEVELS)[(exact[..., None] - torch.tensor(LEVELS)).abs().argmin(-1)]
    packed = quantize(x, RowFormat(256, "nf4", double))
    codes = packed[:, :128].view(torch.uint8).long()
    got = torch.tensor(LEVELS)[torch.stack([codes & 15, codes >> 4], -1).flatten(1)]
    assert torch.equal(got, nearest)
    if not double:
        assert torch.equal(packed[:, 128:].view(torch.float32), scales_of(x)[:, ::BLOCK])


@pytest.mark.parametrize(("bits", "double", "columns", "expected"), [
    ("nf4", True, 4096, 4.133), ("nf4", True, 8192, 4.129), ("nf4", False, 4096, 4.5), ("int8", False, 4096, 8.008),
    ("fp8", False, 4096, 8.031),
])  # fmt: skip
def test_bits_of_a_weight(bits: Bits, double: bool, columns: int, expected: float) -> None:
    form = RowFormat(columns, bits, double)
    assert form.row_bytes % 4 == 0
    assert 8 * form.row_bytes / columns == pytest.approx(expected, abs=5e-4)
    assert quantize(weights(3, columns), form).shape == (3, form.row_bytes)


@pytest.mark.parametrize(("bits", "double"), FORMS)
def test_rows_are_their_own(bits: Bits, double: bool) -> None:
    """Any cut by rows gives the same bytes: what sharding and streaming rely on."""
    for columns in (144, 200):
        x, form = weights(300, columns), RowFormat(columns, bits, double)
        whole, cuts = quantize(x, form), [1, 4, 7, 37, 50, 201]
        assert torch.equal(whole, torch.cat([quantize(part, form) for part in x.split(cuts)]))
        parts = [dequantize(part, form, torch.float32) for part in whole.split(cuts)]
        assert torch.equal(dequantize(whole, form, torch.float32), torch.cat(parts))


@pytest.mark.parametrize(("bits", "double"), FORMS)
def test_what_is_hard_to_scale(bits: Bits, double: bool) -> None:
    x = weights(4, 256)
    x[0] = 0  # a row of nothing
    x[1, :64] = 0  # a block of nothing
    x[2, 70] = 1e4 * x[2].abs().max()  # one outlier
    form = RowFormat(256, bits, double)
    y = round_trip(x, form)
    assert y[0].eq(0).all() and y[1, :64].eq(0).all()
    assert torch.allclose(y[2, 70], x[2, 70], rtol=0.02)
    if bits == "nf4":  # other blocks of the outlier's row keep their precision: 13 octaves in 255 bytes
        calm = (y[2, 128:] - x[2, 128:]).norm() / x[2, 128:].norm()
        assert calm < 0.12
    for bad in (float("nan"), float("inf")):
        x[3, 10] = bad
        broken = round_trip(x, form)
        assert not broken[3, 10].isfinite(), "a broken weight must show"
        assert torch.equal(broken[:3], y[:3])


@pytest.mark.parametrize(("bits", "double"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(bits: Bits, double: bool, dtype: torch.dtype) -> None:
    x, form = weights(20, 130).to(dtype), RowFormat(130, bits, double)
    packed = quantize(x, form)
    assert torch.equal(packed, quantize(x.float(), form))
    assert torch.equal(dequantize(packed, form, dtype), dequantize(packed, form, torch.float32).to(dtype))


def test_equal_to_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    x = weights(256, 576)
    packed, state = functional.quantize_4bit(x, blocksize=BLOCK, quant_type="nf4")
    theirs = functional.dequantize_4bit(packed, state)
    assert (round_trip(x, RowFormat(576, "nf4", False)) - theirs).abs().max() <= 1e-6
    packed, state = functional.quantize_4bit(x, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    double = functional.dequantize_4bit(packed, state)
    ours = round_trip(x, RowFormat(576))
    assert (ours - theirs).norm() <= (double - theirs).norm(), "scales of scales must lose no more than theirs"
    assert (ours - x).norm() <= 1.001 * (double - x).norm()
