"""`shardwise verify` on a GPU that all ranks share: certified, in fp32 and in the run's own precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import config_of
from support.tiny import tiny_run, tokenizer_folder

from shardwise.foresight.verify import command

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

RUNS: dict[str, dict[str, Any]] = {
    "zero3-offload": {"ranks": 2, "parallel__zero": 3, "recompute": "full", "offload": {"optimizer": "cpu"}},
    "tensor-pipeline": {"ranks": 4, "parallel__tensor": 2, "parallel__pipeline": 2},
}


@pytest.mark.parametrize("own_precision", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", RUNS)
def test_certified_on_a_gpu(name: str, own_precision: bool, tmp_path: Path) -> None:
    model = {"config": config_of("llama"), "tokenizer": tokenizer_folder(tmp_path / "tokenizer")}
    run = tiny_run(
        tmp_path, model, train__batch_size=8, train__micro_batch_size=2, data__sequence_length=160,
        data__over_length="drop", precision="bf16", device="cuda", **RUNS[name],
    )  # fmt: skip
    certificate = command.verify(run, options=command.VerifyOptions(own_precision=own_precision))
    for row in certificate.rows:
        print(f"\n{row.verdict:9} {row.claim.name} ({row.seconds:.1f} s): {row.why} {row.difference}")
    assert certificate.passed and certificate.device == "cuda"
