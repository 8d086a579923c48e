"""Checkpoints of offloaded states resume on another mesh, with other states off the device or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import scenarios
from support.families import config_of
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

STEPS, HALF = 4, "checkpoints/step-00000002"
DISK = {"optimizer": "disk", "parameters": "disk"}
HOST = {"optimizer": "cpu", "parameters": "cpu"}
SAVED: dict[str, dict[str, Any]] = {
    "tensor": {"parallel__tensor": 2, "offload": DISK},
    "pipeline": {"parallel__pipeline": 2, "offload": {"optimizer": "disk"}},
    "expert": {"parallel__expert": 2, "offload": HOST},
}
RESUMED: dict[str, list[dict[str, Any]]] = {
    "tensor": [
        {"parallel__pipeline": 2, "offload": DISK},
        {"parallel__context": 2},
        {"parallel__tensor": 4, "offload": HOST},
    ],
    "pipeline": [{"parallel__tensor": 2, "offload": DISK}, {"parallel__zero": 1}],
    "expert": [{"parallel__tensor": 2, "offload": DISK}, {"parallel__pipeline": 2, "parallel__expert": 2}],
}


@pytest.mark.parametrize("axis", SAVED)
def test_resumes_on_another_mesh(axis: str, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    family = "mixtral" if axis == "expert" else "llama"
    tied = {"tie_word_embeddings": family == "llama"}
    model = {
        "config": config_of(family) | {"num_hidden_layers": 4} | tied,
        "tokenizer": str(tmp_path / "tokenizer"),
    }

    def the_run(name: str, **changes: Any) -> dict[str, Any]:
        return tiny_run(
            tmp_path, model, output=str(tmp_path / name), train__steps=STEPS, train__batch_size=8,
            train__micro_batch_size=1, data__sequence_length=128, ranks=4,
            **{"parallel__zero": 3} | changes,
        )  # fmt: skip

    runs = {"saved": the_run("saved", checkpoint__every=2, checkpoint__keep=2, **SAVED[axis])}
    for number, changes in enumerate(RESUMED[axis]):
        runs[str(changes)] = the_run(f"on-{number}", resume=str(tmp_path / "saved" / HALF), **changes)
    found = run_ranks(scenarios.train_each, 4, runs, timeout=400)[0]
    losses, norms, _ = found.pop("saved")
    for name, (on, norms_on, _) in found.items():
        assert on == pytest.approx(losses[2:], abs=2e-6), name
        assert norms_on == pytest.approx(norms[2:], rel=1e-5), name
