"""Weights packed as codes and rounded again are the codes that the weights themselves would be rounded to."""

from __future__ import annotations

import pytest
import torch

from shardwise.nn.kernels.float8 import FORWARD, TINY, inverse_for, largest_of, scale_for
from shardwise.nn.kernels.pack_float8 import ALIGN, lay_out, pack, unpack_into
from shardwise.nn.kernels.transposed_round import rounded

# Of the largest value: below TINY and around it, where weights are, and near the ends of bf16.
EXPONENTS = (-126, -60, -41, -40, -39, -20, -4, 0, 7, 127)


def all_bf16() -> torch.Tensor:
    """Every finite bf16 number."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite()]


def through(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """What a gather of one parameter makes of it; a `factor` other than 1 takes a wrong largest value."""
    row, largest = lay_out([(x.numel(), 0)]), largest_of(x)[None] * factor
    out = torch.empty_like(x)
    unpack_into(out[None], pack(x, row, inverse_for(largest))[None], row, scale_for(largest))
    return out


def codes(x: torch.Tensor) -> torch.Tensor:
    """As a layer rounds its weight."""
    return rounded(x, inverse_for(largest_of(x)), FORWARD).view(torch.uint8)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_rounding_again_finds_the_same_codes_and_scale(exponent: int) -> None:
    """For every largest value of this exponent, every number that is not larger."""
    values = all_bf16()
    for mantissa in range(128):
        x = values[values.abs() <= (1 + mantissa / 128) * 2.0**exponent]
        again = through(x)
        assert torch.equal(inverse_for(largest_of(again)), inverse_for(largest_of(x))), (mantissa, exponent)
        assert torch.equal(codes(again), codes(x)), (mantissa, exponent)


def test_a_wrong_scale_is_seen() -> None:
    """The test above can fail: by a largest value that is one bf16 step off, and by a TINY that is no bf16 number."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert not torch.equal(codes(through(x, 1 + 2**-7)), codes(x))
    assert torch.tensor(TINY).bfloat16().item() == TINY and torch.tensor(1e-12).bfloat16().item() != 1e-12


def test_an_inverse_is_a_bf16_number_whatever_divides() -> None:
    """Compiled code divides with an error of two in the last place or so; eight times that changes nothing."""
    values = all_bf16().float()
    largest = values[values >= TINY]
    exact = 448 / largest.double()
    for error in (-(2**-20), 0.0, 2**-20):
        near = (exact * (1 + error)).float()
        assert torch.equal(near.bfloat16().float(), inverse_for(largest))
    assert ((inverse_for(largest) * largest / 448 - 1).abs() <= 2**-8).all()


@pytest.mark.slow
def test_a_compiler_keeps_the_rounding() -> None:
    torch._dynamo.reset()
    x = all_bf16()[::7].view(1, -1).clone()
    for bound in (1.0, 0.73, 3e-3):
        part = x.clamp(-bound, bound)
        made = torch.compile(lambda w: rounded(w, inverse_for(largest_of(w)), FORWARD))(part)
        assert torch.equal(made.view(torch.uint8), codes(part))
        assert torch.equal(torch.compile(lambda w: inverse_for(largest_of(w)))(part), inverse_for(largest_of(part)))


def test_zeros_stay_zeros() -> None:
    assert not through(torch.zeros(64, dtype=torch.bfloat16)).any()
    negative = through(torch.tensor([-0.0, 1.0]).bfloat16())
    assert negative[0].signbit() and negative[1] == 1


def test_what_is_not_a_number_stays_so() -> None:
    x = torch.ones(64).bfloat16()
    x[5] = float("nan")
    row, largest = lay_out([(64, 0)]), torch.ones(1)
    out = torch.empty_like(x)
    unpack_into(out[None], pack(x, row, inverse_for(largest))[None], row, scale_for(largest))
    assert out[5].isnan() and (out[torch.arange(64) != 5] == 1).all()


def test_other_parts_travel_as_they_are() -> None:
    """Rows of several ranks, in and out of order, with parts of odd sizes and of none."""
    torch.manual_seed(0)
    row = lay_out([(7, -1), (48, 0), (0, -1), (3, -1), (16, 1), (5, -1), (0, 1)])
    assert (row.elements, row.bytes) == (79, 2 * 15 + 64 + 2) and row.bytes % ALIGN == 0
    x = torch.randn(2, 3, row.elements).bfloat16()
    parts = ((7, 55), (58, 74))
    largest = torch.stack([x[..., start:stop].abs().max() for start, stop in parts]).float()
    packed = torch.stack([torch.stack([pack(one, row, inverse_for(largest)) for one in two]) for two in x])
    out = torch.empty(3, 2, row.elements, dtype=torch.bfloat16)
    unpack_into(out.transpose(0, 1), packed, row, scale_for(largest))
    found = out.transpose(0, 1)
    for start, stop in ((0, 7), (55, 58), (74, 79)):
        assert torch.equal(found[..., start:stop], x[..., start:stop])
    for number, (start, stop) in enumerate(parts):
        assert not torch.equal(found[..., start:stop], x[..., start:stop])
        plain = rounded(x[..., start:stop], inverse_for(largest[number]), FORWARD).float() * scale_for(largest[number])
        assert torch.equal(found[..., start:stop], plain.bfloat16())
