"""With everything on disk, memory is bounded by blocks and buffers, whatever the size of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import scenarios
from support.ranks import run_ranks
from support.tiny import LLAMA, tiny_run, tokenizer_folder

STATES = 16  # bytes per parameter: itself, its gradient, two moments


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the process's memory from /proc")
def test_states_on_disk_take_no_memory(tmp_path: Path) -> None:
    """Filling, checking, training, saving and exporting; benchmarks/disk_memory.py shows it under a hard limit.

    Of three times the layers: what memory grows by is a small part of what the states do. The exported model is not
    loaded to compare it, which takes the memory of its weights.
    """
    tokenizer_folder(tmp_path / "tokenizer")
    found = []
    for layers in (8, 24):
        wide = LLAMA | {"hidden_size": 512, "intermediate_size": 1408, "num_key_value_heads": 4}
        run = tiny_run(
            tmp_path, model={"config": wide | {"num_hidden_layers": layers}, "tokenizer": str(tmp_path / "tokenizer")},
            train__steps=1, train__batch_size=1, data__sequence_length=128, parallel__zero=3, recompute="full",
            offload={"optimizer": "disk", "parameters": "disk"}, export={"shard_size": "64MB", "check": False},
            output=str(tmp_path / f"out-{layers}"),
        )  # fmt: skip
        parameters, grown = run_ranks(scenarios.memory_growth, 1, run)[0]
        print(f"\n{parameters / 1e6:.1f} M parameters, {STATES * parameters / 1e6:.0f} MB, grown {grown / 1e6:.0f} MB")
        found.append((STATES * parameters, grown))
    (small, less), (large, more) = found
    assert more - less < 0.4 * (large - small)  # 0.14
