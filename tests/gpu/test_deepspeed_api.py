"""The DeepSpeed script on a GPU: NCCL beside gloo, bf16, zero.Init from host memory, a checkpoint, the launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EXAMPLE = Path(__file__).parents[2] / "examples/deepspeed"


@pytest.mark.parametrize("stage", [2, 3])
def test_script(stage: int, tmp_path: Path) -> None:
    """bf16 learns, and the half that is resumed from a checkpoint is the whole's second half."""
    settings = json.loads((EXAMPLE / "ds_config.json").read_text())
    settings |= {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 8}
    (tmp_path / "ds.json").write_text(json.dumps(settings))

    def train(name: str, *more: str) -> list[float]:
        command = [sys.executable, "-m", "shardwise", "deepspeed", "--num_gpus", "1", str(EXAMPLE / "train.py")]
        command += ["--deepspeed_config", str(tmp_path / "ds.json"), "--losses", str(tmp_path / name), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return [record["loss"] for record in json.loads((tmp_path / name).read_text())]

    whole = train("whole.json", "--save", str(tmp_path / "checkpoint"))
    rest = train("rest.json", "--load", str(tmp_path / "checkpoint"))
    assert whole[-1] < whole[0] - 0.5
    assert whole[15:] == pytest.approx(rest, abs=1e-3)
