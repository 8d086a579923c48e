"""Optimizer states off a real device: equal to the run that keeps them on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run
from torch import nn

from shardwise.optim.rules import RULES
from shardwise.parallel.offload.optimizer import OffloadedOptimizer, StatePlacement

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# In bf16 the fused kernel rounds a master's last bit otherwise than PyTorch's AdamW; then weights flip a bit of bf16.
BOUNDS = {"fp32": (1e-6, 1e-6), "bf16": (5e-4, 1e-2)}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("clip", [0.5, None], ids=["clipped", "eager"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 12), (1, 4), (2, 2)], ids=["lean", "accumulated", "two-ranks"])
def test_offloaded_equals_plain(
    precision: str, where: str, clip: float | None, ranks: int, micro: int, tmp_path: Path
) -> None:
    results = []
    for place in ("none", where):
        run = tiny_run(
            tmp_path, precision=precision, device="cuda", backend="gloo", parallel__zero=3, train__max_grad_norm=clip,
            train__steps=8, train__micro_batch_size=micro, offload__optimizer=place, output=str(tmp_path / place),
        )  # fmt: skip
        results.append(run_ranks(scenarios.train, ranks, run)[0])
    plain, offloaded = results
    loss = max(abs(a - b) for a, b in zip(plain[0], offloaded[0], strict=True))
    parameter = max((plain[2][k] - offloaded[2][k]).abs().max().item() for k in plain[2])
    print(f"\n{precision}, {where}, clip {clip}, {ranks} × {micro}: loss {loss:.1e}, parameters {parameter:.1e}")
    assert loss <= BOUNDS[precision][0] and parameter <= BOUNDS[precision][1]
    assert offloaded[0][-1] < offloaded[0][0] - 0.1


def _updated(device: torch.device, pieces: int, cycles: int) -> torch.Tensor:
    """A parameter after six clipped steps; before each the stream of the updates is kept busy for so many cycles."""
    elements = 1 << 16
    draw = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(elements, generator=draw).to(device))
    group = {"params": [parameter], "weight_decay": 0.0}
    defaults = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
    placement = StatePlacement(device, piece=elements // pieces)
    optimizer = OffloadedOptimizer([group], {"weight": parameter}, RULES["adamw"], "fp32", defaults, placement)
    gradients = [torch.randn(elements, generator=draw).to(device) for _ in range(6)]
    for step, gradient in enumerate(gradients):
        parameter.grad, scale = gradient, torch.full((), 0.1 * (step + 1), device=device)
        if cycles:
            with torch.cuda.stream(optimizer.pager.work):
                torch.cuda._sleep(cycles)
        optimizer.step(scale=scale)
        del scale
        _ = [torch.full((), 1e3, device=device) for _ in range(64)]  # takes the memory that was let go of
    optimizer.finish()
    return parameter.detach().cpu()


@pytest.mark.parametrize("pieces", [1, 5])
def test_a_host_that_runs_ahead_changes_nothing(pieces: int) -> None:
    """A clip's factor is let go of, and pages are opened again, while updates are still queued."""
    device = torch.device("cuda", 0)
    assert torch.equal(_updated(device, pieces, 0), _updated(device, pieces, 50_000_000))
    assert torch.allclose(_updated(device, pieces, 0), _updated(torch.device("cpu"), pieces, 0), atol=1e-6)
