"""The cross-entropy kernel against plain steps."""

from __future__ import annotations

import pytest
import torch

from shardwise.nn.kernels.cross_entropy import cross_entropy_, cross_entropy_reference_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("columns", [7, 8192, 50257, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(columns)
    logits = (3 * torch.randn(65, columns, device="cuda", generator=generator)).to(dtype)
    logits[5] = 1e4  # far from 0, and all alike
    labels = torch.randint(0, columns, (65,), device="cuda", generator=generator)
    labels[::7] = -100
    labels[1], labels[2] = 0, columns - 1
    for gradient in (False, True):
        ours, plain = logits.clone(), logits.clone()
        losses = cross_entropy_(ours, labels, -100, gradient)
        torch.testing.assert_close(
            losses, cross_entropy_reference_(plain, labels, -100, gradient), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 1e-2)
        assert gradient or torch.equal(ours, logits)
