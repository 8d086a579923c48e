"""Optimizers on a GPU: the kernel beside the plain path, and every optimizer in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import optimizers, scenarios
from support.ranks import run_ranks
from support.tiny import LLAMA, tiny_run, tokenizer_folder

from shardwise.optim.codecs import FIRST, SECOND, StoredState, mix
from shardwise.optim.rules import RULES, Hyper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def empty(codec: Any, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(size, dtype=dtype, device="cuda") for name, (size, dtype) in codec.shapes(shape).items()}


def plain(param: Any, grad: Any, parts: Any, codecs: Any, seeds: Any, offset: int, hyper: Hyper) -> None:
    names = ("exp_avg", "exp_avg_sq")
    states = {n: [c.decode(p, param.shape)] for n, c, p in zip(names, codecs, parts, strict=True)}
    RULES["adamw"]([param], [grad], states, hyper)
    for name, codec, part, seed in zip(names, codecs, parts, seeds, strict=True):
        codec.encode(states[name][0], part, seed, offset)


@pytest.mark.parametrize("shape", [(256, 1024), (70, 300), (33, 131), (64, 100), (1, 100_001)])
@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_the_kernel_is_the_plain_path(kind: str, shape: tuple[int, int]) -> None:
    """Parameters to rounding; codes the same, but for values that rounding puts on the other side of a draw."""
    from shardwise.optim.kernels import coded_adamw as fused

    codecs = FIRST[kind], SECOND[kind]
    torch.manual_seed(0)
    ours = torch.randn(shape, device="cuda")
    theirs = ours.clone()
    parts, reference = ([empty(codec, shape) for codec in codecs] for _ in range(2))
    for step in range(1, 6):
        grad = torch.randn(shape, device="cuda") * torch.rand(shape[0], 1, device="cuda") ** 4
        hyper, seeds = Hyper(1e-2, (0.9, 0.95), 1e-8, 0.1, step), (mix(step, 0), mix(step, 1))
        mean, square = map(StoredState, codecs, parts, seeds)
        fused.adamw(ours, grad, mean, square, 1 << 40, hyper)
        plain(theirs, grad, reference, codecs, seeds, 1 << 40, hyper)
    off = [(a["codes"] != b["codes"]).float().mean().item() for a, b in zip(parts, reference, strict=True)]
    print(f"\n{kind} {shape}: parameters {(ours - theirs).abs().max():.1e}, share of codes that differ {off}")
    assert max(off) <= 1e-3
    assert ((ours - theirs).abs() > 1e-5).float().mean() <= 1e-3
    for a, b in zip(parts, reference, strict=True):
        torch.testing.assert_close(a["scales"], b["scales"], rtol=1e-2, atol=0)


def test_speed_of_the_kernel() -> None:
    """Bytes that must move (parameter and gradient read, parameter written, states both ways) by the time it takes."""
    from shardwise.optim.kernels import coded_adamw as fused

    shape = (4096, 2048)
    param, grad = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
    hyper = Hyper(1e-3, (0.9, 0.95), 1e-8, 0.1, 1)
    for kind in ("8bit", "4bit"):
        codecs = FIRST[kind], SECOND[kind]
        parts = [empty(codec, shape) for codec in codecs]
        moments = list(map(StoredState, codecs, parts, (1, 2)))
        times = {}
        for name, run in {
            "kernel": lambda m=moments: fused.adamw(param, grad, *m, 0, hyper),
            "plain": lambda c=codecs, p=parts: plain(param, grad, p, c, (1, 2), 0, hyper),
        }.items():
            for _ in range(3):
                run()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(20):
                run()
            end.record()
            torch.cuda.synchronize()
            times[name] = start.elapsed_time(end) / 20 / 1e3
        held = sum(part.numel() * part.element_size() for one in parts for part in one.values())
        moved = 12 * param.numel() + 2 * held
        for name, seconds in times.items():
            print(
                f"\n{kind} {name}: {moved / seconds / 1e9:.0f} GB/s, {param.numel() / seconds / 1e9:.1f} G parameters/s"
            )
        assert times["kernel"] < times["plain"] / 3


def settings(which: str) -> dict[str, Any]:
    return {f"train__{k}": v for k, v in ({"optimizer": which} | optimizers.OPTIMIZERS[which]).items()}


@pytest.mark.parametrize("which", list(optimizers.OPTIMIZERS))
def test_two_ranks_on_one_card_equal_one(which: str, tmp_path: Path) -> None:
    model = {"config": LLAMA | {"hidden_size": 96}, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    losses = []
    for ranks in (1, 2):
        output = str(tmp_path / str(ranks))
        run = tiny_run(tmp_path, model, parallel__zero=3, device="cuda", backend="gloo", output=output,
                       train__steps=10, **settings(which))  # fmt: skip
        losses.append(run_ranks(scenarios.train, ranks, run)[0][0])
    worst = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"\nCUDA {which}: {losses[0][0]:.3f} → {losses[0][-1]:.3f}, two ranks differ by {worst:.1e}")
    assert worst <= 5e-3


@pytest.mark.parametrize("which", list(optimizers.OPTIMIZERS))
def test_no_host_sync_in_the_step(which: str, tmp_path: Path) -> None:
    model = {"config": LLAMA | {"hidden_size": 96}, "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    run = tiny_run(tmp_path, model, train__steps=3, precision="bf16", device="cuda", backend="gloo",
                   output=str(tmp_path / "out"), **settings(which))  # fmt: skip
    assert run_ranks(scenarios.step_without_sync, 1, run)[0]
