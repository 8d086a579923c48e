"""The same promises on a GPU. Several ranks share one card through gloo (NCCL refuses that) to compare stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import cli, scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BOUNDS = {"fp32": (1e-4, 1e-3), "bf16": (5e-3, 5e-2), "fp16": (2e-3, 5e-2)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    tokenizer_folder(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def one_rank(shared: Path) -> dict[str, Any]:
    return {
        precision: run_ranks(
            scenarios.train,
            1,
            tiny_run(shared, precision=precision, device="cuda", backend="gloo", output=str(shared / precision)),
        )[0]
        for precision in BOUNDS
    }


LAYOUTS = [(0, None, "fp32"), (1, None, "bf16"), (2, None, "fp16"), (3, None, "fp32"), (3, None, "bf16")]
LAYOUTS += [(3, None, "fp16"), (3, 2, "fp32")]


@pytest.mark.parametrize(("zero", "shard", "precision"), LAYOUTS)
def test_four_ranks_on_one_card_equal_one(
    zero: int, shard: int | None, precision: str, one_rank: dict[str, Any], tmp_path: Path, shared: Path
) -> None:
    run = tiny_run(
        shared,
        parallel__zero=zero,
        parallel__dp_shard_size=shard,
        precision=precision,
        device="cuda",
        backend="gloo",
        output=str(tmp_path),
    )
    losses, _, parameters = run_ranks(scenarios.train, 4, run)[0]
    reference = one_rank[precision]
    loss = max(abs(a - b) for a, b in zip(losses, reference[0], strict=True))
    parameter = max((parameters[k] - reference[2][k]).abs().max().item() for k in parameters)
    print(f"\nCUDA zero {zero} shard {shard} {precision}: loss {loss:.1e}, parameters {parameter:.1e}")
    assert loss <= BOUNDS[precision][0] and parameter <= BOUNDS[precision][1]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_the_command_with_nccl(precision: str, shared: Path, tmp_path: Path) -> None:
    """One rank, the real command: trains, evaluates, saves in the background, and goes on bit-identically."""
    run = tiny_run(
        shared, precision=precision, device="auto", data__eval="5%", checkpoint__every=5, output=str(tmp_path / "a")
    )
    code, out, err = cli.train(cli.write_run(tmp_path, run))
    assert code == 0, err
    assert "on cuda (nccl)" in out
    reference = cli.losses(tmp_path / "a")
    assert reference[20] < reference[1] - 0.3
    moved = run | {"output": str(tmp_path / "b"), "resume": str(tmp_path / "a/checkpoints/step-00000015")}
    code, _, err = cli.train(cli.write_run(tmp_path / "b", moved))
    assert code == 0, err
    assert cli.losses(tmp_path / "b") == {s: v for s, v in reference.items() if s > 15}


def test_resume_across_devices(shared: Path, tmp_path: Path) -> None:
    """Saved by two ranks on the card at stage 3, taken up by one on the CPU."""
    run = tiny_run(
        shared,
        train__steps=6,
        checkpoint__every=3,
        parallel__zero=3,
        device="cuda",
        backend="gloo",
        output=str(tmp_path / "a"),
    )
    reference = run_ranks(scenarios.train, 2, run)[0][0]
    moved = tiny_run(
        shared,
        train__steps=6,
        device="cpu",
        output=str(tmp_path / "b"),
        resume=str(tmp_path / "a/checkpoints/step-00000003"),
    )
    losses = run_ranks(scenarios.train, 1, moved)[0][0]
    assert max(abs(a - b) for a, b in zip(losses, reference[3:], strict=True)) <= 1e-4


def test_no_host_sync_in_the_step(shared: Path, tmp_path: Path) -> None:
    """PyTorch raises at any wait for the device in forward, backward, clipping and the optimizer."""
    run = tiny_run(shared, train__steps=3, precision="bf16", device="cuda", backend="gloo", output=str(tmp_path))
    assert run_ranks(scenarios.step_without_sync, 1, run)[0]
