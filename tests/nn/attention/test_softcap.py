"""Softcaps and sinks: the reference against a formula written out, and the kernel against the reference."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.nn.attention.softcap import attend_capped, reference

LENGTHS = [5, 1, 9, 2]


def spelled_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None,
    window: int | None, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Token by token, head by head."""
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=query.dtype)
    starts = [sum(LENGTHS[:n]) for n, length in enumerate(LENGTHS) for _ in range(length)]
    group = query.shape[1] // key.shape[1]
    for token, start in enumerate(starts):
        first = start if window is None else max(start, token - window + 1)
        for head in range(query.shape[1]):
            scores = [float(query[token, head] @ key[seen, head // group]) * scale for seen in range(first, token + 1)]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            total = sum(map(math.exp, scores)) + (0.0 if sinks is None else math.exp(float(sinks[head])))
            for seen, score in zip(range(first, token + 1), scores, strict=True):
                out[token, head] += math.exp(score) / total * value[seen, head // group]
    return out


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_the_reference_is_the_formula(softcap: float | None, sunk: bool, window: int | None) -> None:
    made = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    q, k, v = (
        torch.randn(tokens, h, d, generator=made, dtype=torch.float64) for h, d in ((4, 6), (2, 6), (2, 5))
    )  # fmt: skip
    sinks = torch.randn(4, generator=made, dtype=torch.float64) if sunk else None
    lengths = torch.tensor(LENGTHS)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).int()
    ours = reference(q, k, v, starts, 0.4, softcap, sinks, window)
    torch.testing.assert_close(ours, spelled_out(q, k, v, softcap, sinks, window, 0.4), rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_in_tritons_interpreter() -> None:
    """The same script as on a GPU, where no GPU is needed; slow, so a few shapes."""
    script = Path(__file__).parents[2] / "support" / "capped_kernel.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_block_that_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hands out what was saved once; the kernels, which need a GPU, are played by plain operations."""
    from torch.utils.checkpoint import checkpoint

    kernels = SimpleNamespace(
        forward=lambda q, k, v, *_: (2 * q, q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)),
        backward=lambda gradient, q, k, v, *_: (2 * gradient, torch.zeros_like(k), torch.zeros_like(v)),
    )
    monkeypatch.setitem(sys.modules, "shardwise.nn.attention.softcap_triton", kernels)  # type: ignore[misc]
    monkeypatch.setattr("shardwise.nn.attention.softcap_triton", kernels, raising=False)
    q, k, v = (torch.randn(4, 2, 8, requires_grad=True) for _ in range(3))
    spans = torch.zeros(4, dtype=torch.int32), torch.full((4,), 4, dtype=torch.int32)
    out = checkpoint(lambda *given: attend_capped(*given, *spans, 4, 1.0, 5.0), q, k, v, use_reentrant=False)
    out.sum().backward()
    torch.testing.assert_close(q.grad, torch.full_like(q, 2.0))
