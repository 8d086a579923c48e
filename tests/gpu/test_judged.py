"""Steps of objectives with a second model on a GPU: nothing in them waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import scenarios
from support.judged import judged_run
from support.ranks import run_ranks
from support.tiny import LLAMA, saved_model, tiny_run, tokenizer_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_no_wait_for_the_device(objective: str, tmp_path: Path) -> None:
    run = judged_run(tmp_path, objective, device="cuda", precision="bf16", parallel__zero=3)
    assert run_ranks(scenarios.step_without_sync, 1, run) == [True]


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "asked"])
def test_no_wait_for_the_device_or_the_teacher(stored: bool, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    teacher = saved_model(tmp_path / "teacher", LLAMA | {"hidden_size": 64}, seed=7)
    objective = {"type": "distill", "teacher": teacher, "top_k": 16, "cache": stored}
    run = tiny_run(tmp_path, objective=objective, device="cuda", precision="bf16", parallel__zero=3)
    assert run_ranks(scenarios.step_without_sync, 1, run) == [True]
