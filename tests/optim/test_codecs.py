"""Stored states: what they take, how far off they are, and that they are right on the average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.optim.codecs import BF16, FIRST, FP32, SECOND, Codec, codec_of, mix, noise

SHAPES = [(64, 256), (40, 300), (33, 129), (5, 7, 200), (1, 9001)]
CODED = [(state, kind) for state in ("exp_avg", "exp_avg_sq") for kind in ("bf16", "8bit", "4bit")]


def values(state: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Magnitudes over some six powers of ten, as moments have; one row is zero."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator) * (2 * torch.randn(shape, generator=generator)).exp() * 1e-4
    value[-1, ..., : shape[-1] // 2] = 0
    return value.square() if state == "exp_avg_sq" else value


def empty(codec: Codec, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in codec.shapes(shape).items()}


def through(codec: Codec, value: Tensor, seed: int) -> Tensor:
    parts = empty(codec, tuple(value.shape))
    codec.encode(value, parts, seed)
    return codec.decode(parts, value.shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("state", "kind"), CODED)
def test_right_on_the_average(state: str, kind: Any, shape: tuple[int, ...]) -> None:
    """The mean over many seeds is the value; each element lies within a level of it."""
    codec, value = codec_of(kind, state, shape), values(state, shape)
    found = torch.stack([through(codec, value, mix(seed)) for seed in range(200)]).double()
    level = {"bf16": 2.0**-7, "8bit": 2.0**-3, "4bit": 1.0}[kind]
    least = {"bf16": 0.0, "8bit": 2.0**-15, "4bit": 0.1}[kind] * float(value.abs().max())
    gap = level * value.abs() + least + 1e-30
    assert ((found - value).abs() <= gap).all()
    assert ((found.mean(0) - value).abs() <= 0.25 * gap).all(), "to the nearest would be off by up to half"
    assert abs((found.mean(0) - value).sum() / value.abs().sum()) <= 2e-2 * level


@pytest.mark.parametrize(("state", "kind"), CODED)
def test_zeros_are_zeros(state: str, kind: Any) -> None:
    """What was never written, and what zeros were written to."""
    codec, shape = codec_of(kind, state, (40, 300)), (40, 300)
    assert not codec.decode(empty(codec, shape), shape).any()
    assert not through(codec, torch.zeros(shape), 1).any()


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_a_second_moment_is_never_lost(kind: str) -> None:
    """However small beside the largest of its block: Adam divides by it. What is rounded up makes steps shorter."""
    value = torch.full((64, 128), 1e-20)
    value[:, 0] = 1.0
    found = through(SECOND[kind], value, 0)
    assert (found > 0).all() and (found[:, 1:] >= 1e-20).all()


@pytest.mark.parametrize("kind", ["bf16", "8bit", "4bit"])
def test_moving_averages_do_not_get_stuck(kind: str) -> None:
    """Decay 0.999 from 1 towards a mean of 0.01, in 4000 steps; rounding to the nearest would stay at 1."""
    codec, shape = SECOND[kind], (64, 128)
    parts = empty(codec, shape)
    codec.encode(torch.ones(shape), parts, 0)
    for step in range(4000):
        value = codec.decode(parts, shape)
        codec.encode(value.mul_(0.999).add_(0.001 * 0.01), parts, mix(step))
    exact = 0.01 + 0.99 * 0.999**4000
    assert codec.decode(parts, shape).mean().item() == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("codec", [BF16, *FIRST.values(), *SECOND.values()])
def test_the_noise_belongs_to_the_place(codec: Codec) -> None:
    """Any rows on their own are coded as in the whole; another seed codes them otherwise."""
    value = values("exp_avg_sq", (40, 300))
    whole, cut, other = (empty(codec, (40, 300)) for _ in range(3))
    codec.encode(value, whole, 5)
    for top, bottom in ((0, 7), (7, 8), (8, 40)):
        codec.encode(value[top:bottom], {n: p[top:bottom] for n, p in cut.items()}, 5, offset=top * 300)
    codec.encode(value, other, 6)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert codec is FP32 or any(not torch.equal(whole[name], other[name]) for name in whole)


def test_the_noise_is_even_and_unrelated() -> None:
    """Between neighbours, rows and seeds."""
    size = 1 << 20
    draws = [noise(torch.empty(size), mix(seed), 0).double() / 2**32 + 0.5 for seed in range(3)]
    for draw in draws:
        assert draw.mean().item() == pytest.approx(0.5, abs=2e-3)
        counts = torch.histc(draw.float(), 64, 0, 1)
        assert (counts / size * 64 - 1).abs().max() < 0.05
    for a, b in ((draws[0], draws[1]), (draws[1], draws[2]), (draws[0][1:], draws[0][:-1])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 5e-3


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(kind: str, bad: float) -> None:
    """A broken step must show, not be rounded away."""
    for codec in (FIRST[kind], SECOND[kind]):
        value = torch.ones(64, 128)
        value[3, 5] = bad
        found = through(codec, value, 0)
        assert not found[3].isfinite().all() and found[4:].isfinite().all()


def test_parts_have_the_parameter_s_rows() -> None:
    for shape in SHAPES:
        for kind in ("bf16", "8bit", "4bit"):
            for state in ("exp_avg", "exp_avg_sq"):
                assert all(size[0] == shape[0] for size, _ in codec_of(kind, state, shape).shapes(shape).values())


def test_vectors_and_small_matrices_are_not_coded() -> None:
    for shape in ((100_000,), (63, 64), ()):
        assert codec_of("8bit", "exp_avg", shape) is FP32
    assert codec_of("8bit", "exp_avg", (64, 64)) is not FP32
