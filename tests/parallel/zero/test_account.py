"""Bytes on the wire and bytes held, counted, against the laws of ZeRO."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

from shardwise.parallel.zero.accounting import predicted_bytes

TOLERANCE = 0.02


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("account")
    tokenizer_folder(folder / "tokenizer")
    return folder


def law(stage: int, micro_batches: int) -> float:
    """Elements moved per rank and step, in units of the parameters."""
    return {0: 2, 1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_wire(stage: int, micro_batches: int, shared: Path) -> None:
    run = tiny_run(shared, parallel__zero=stage, train__micro_batch_size=6 // micro_batches)
    for parameters, wire, _ in run_ranks(scenarios.wire_and_memory, 2, run):
        moved = sum(wire.values()) / parameters
        print(f"\nstage {stage}, {micro_batches} micro-batches: {moved:.3f} Ψ {wire}")
        assert moved == pytest.approx(law(stage, micro_batches), rel=TOLERANCE)


def test_wire_of_hybrid_sharding(shared: Path) -> None:
    """Within a group as stage 3; across groups one all-reduce of the shard, on the last micro-batch only."""
    run = tiny_run(shared, parallel__zero=3, parallel__dp_shard_size=2, train__micro_batch_size=1)
    for parameters, wire, _ in run_ranks(scenarios.wire_and_memory, 4, run):
        assert wire["all_gather"] + wire["reduce_scatter"] == pytest.approx(9 * parameters, rel=TOLERANCE)
        assert wire["all_reduce"] == pytest.approx(2 * parameters / 2, rel=TOLERANCE)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_held(stage: int, ranks: int, shared: Path, cpu_precision_env: dict[str, str]) -> None:
    """In mixed precision, while gradients are being accumulated: working copies, gradients, master and moments."""
    run = tiny_run(shared, parallel__zero=stage, train__micro_batch_size=12 // (3 * ranks), precision="bf16")
    for parameters, _, held in run_ranks(scenarios.wire_and_memory, ranks, run, env=cpu_precision_env):
        expected = predicted_bytes(parameters, stage, 1 if stage == 0 else ranks, "bf16")
        per = {k: round(v / parameters, 3) for k, v in held[0].items()}
        print(f"\nstage {stage}, {ranks} ranks: {per} B/parameter")
        assert held[0] == {name: pytest.approx(size, rel=TOLERANCE) for name, size in expected.items()}
        after = held[-1]  # gathered parameters are gone, gradients are reduced
        assert after["parameters"] == 0
        divided = parameters if stage == 0 else parameters / ranks
        assert after["gradients"] == pytest.approx(4 * divided, rel=TOLERANCE)


def test_predictions_are_zero_s_table() -> None:
    """ZeRO's own example, 7.5B on 64 devices, with its 2-byte gradients: 120, 31.4, 16.6, 1.9 GB."""
    psi, n = 7.5e9, 64
    with_half_gradients = [
        (lambda p: p["parameters"] + p["gradients"] / 2 + p["optimizer"] + (2 * psi / n if stage == 3 else 0))(
            predicted_bytes(int(psi), stage, 1 if stage == 0 else n, "bf16")
        )
        for stage in range(4)
    ]
    assert [round(b / 1e9, 1) for b in with_half_gradients] == [120.0, 31.4, 16.6, 1.9]
