"""All five axes at once in a world of 32 ranks, of which one is there: the real set-up and step, nobody to talk to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.families import config_of
from support.tiny import tiny_run, tokenizer_folder

RANKS = 32
AXES = {f"parallel__{axis}": 2 for axis in ("tensor", "context", "pipeline", "expert")}


def test_all_axes_on_thirty_two_ranks(tmp_path: Path) -> None:
    model = {"config": config_of("qwen3_moe") | {"num_hidden_layers": 4}, "tokenizer": tokenizer_folder(tmp_path / "t")}
    run = tiny_run(
        tmp_path, model, ranks=RANKS, parallel__zero=3, train__batch_size=16, train__micro_batch_size=2,
        data__sequence_length=160, data__over_length="drop", resume="never", **AXES,
    )  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    found: list[dict[str, Any]] = []
    for rank in (0, RANKS // 2 + 3):  # of both stages with the same data, at either end of the other axes
        command = [sys.executable, "-m", "support.fake", "run.json", str(rank), str(RANKS), "known"]
        paths = ":".join(str(Path(__file__).parents[i] / end) for i, end in ((1, ""), (2, "src")))
        done = subprocess.run(
            command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, last = found
    assert first["place"] == [0, 0, 0, 0] and last["place"] == [1, 0, 1, 1]
    assert "model.embed_tokens.weight" in first["names"] and "lm_head.weight" in last["names"]
    assert not set(first["names"]) & set(last["names"])
    # Keys go round and hidden states between stages, gradients the other way; the first also tells their shapes.
    assert last["wire"]["send"] == last["wire"]["recv_"] > 0
    assert 0 < first["wire"]["send"] - first["wire"]["recv_"] < 4096
    assert all(one["wire"][kind] > 0 for one in found for kind in ("all_gather", "reduce_scatter", "all_to_all"))
