"""The kernel for softcaps and sinks is as near to the truth as plain operations in the same precision."""

from __future__ import annotations

import random

import pytest
import torch
from support.capped_kernel import SMALL, Shape, errors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = (300, 1, 7, 128, 129, 63, 500, 2, 400)
SHAPES = [
    *SMALL,
    Shape(LENGTHS, 8, 4, 256, 256, softcap=5.0),  # Gemma 2's heads
    Shape(LENGTHS, 8, 4, 256, 256, softcap=5.0, window=100),
    Shape(LENGTHS, 8, 1, 64, 64, sunk=True, window=128),  # gpt-oss's
    Shape(LENGTHS, 4, 4, 128, 128, softcap=3.0, sunk=True),
    Shape(LENGTHS, 4, 2, 80, 80, softcap=3.0, window=1),
    Shape(LENGTHS, 4, 4, 192, 128, softcap=3.0),
    Shape((2048,), 4, 2, 256, 256, softcap=5.0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_near_to_the_truth_as_plain_operations(shape: Shape, dtype: torch.dtype) -> None:
    for name, (ours, plain) in errors(shape, dtype, "cuda").items():
        print(f"\n{shape} {name}: {ours:.1e}, plain {plain:.1e}")
        assert ours <= 3 * plain + 8 * torch.finfo(dtype).eps, name


def test_random_layouts() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        lengths = tuple(rng.randint(1, 300) for _ in range(rng.randint(1, 8)))
        window = rng.choice([None, 1, 17, 64, 500])
        shape = Shape(lengths, 4, 2, rng.choice([32, 64, 96]), 32, rng.choice([None, 2.0]), rng.random() < 0.5, window)
        for name, (ours, plain) in errors(shape, torch.bfloat16, "cuda", seed).items():
            assert ours <= 3 * plain + 0.05, (shape, name, ours, plain)
