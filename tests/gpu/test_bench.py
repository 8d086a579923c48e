"""`shardwise bench` on a real GPU: figures between what is plausible and what the data sheet allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.core.hardware.measured import read_measured
from shardwise.core.hardware.specs import this_machine
from shardwise.foresight.bench import command as bench_command
from shardwise.foresight.bench import device as steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CARD = torch.device("cuda", 0)


def test_figures_are_below_the_data_sheet_and_not_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    bench_command.bench(tmp_path, None, [part for part in bench_command.PARTS if part != "network"], True, False)
    found, table = read_measured(torch.cuda.get_device_name()), this_machine(measured=False)
    assert found is not None
    for precision, speed in found.matmul.items():
        assert 0.2 * table.device.peak[precision] < speed < 1.05 * table.device.peak[precision], precision
    assert found.stream and 0.5 * table.device.bandwidth < found.stream < 1.05 * table.device.bandwidth
    assert found.attention_forward and found.attention_backward and found.host_link and found.host_link > 1e9
    assert found.launch and 1e-7 < found.launch < 1e-4
    assert this_machine().device.flops("fp16") == found.matmul["fp16"]


def test_tf32_is_faster_than_fp32_and_is_put_back() -> None:
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("no TF32 before Ampere")
    before = torch.get_float32_matmul_precision()
    slow, fast = (steps.matmul(precision, 4096, CARD, 0.2) for precision in ("fp32", "tf32"))
    assert slow and fast and fast >= slow and torch.get_float32_matmul_precision() == before
