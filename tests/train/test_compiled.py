"""Compiled blocks are one graph each: a break is a loss of speed that nothing else tells."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.compiled import steps_compiled
from support.ranks import run_ranks
from support.tiny import LLAMA, QWEN3_MOE
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from shardwise.core.cache import cache_root
from shardwise.core.effective_device import _with_eager_fallback, as_written, compiled

ROUTERS: dict[str, Any] = {
    "model": {"config": QWEN3_MOE, "tokenizer": "none"}, "router": {"aux_loss": 0.5, "z_loss": 0.1}, "precision": "bf16"
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "fp8": {"precision": "bf16", "fp8": {"recipe": "tensorwise", "min_features": 16}},
    "fp8 by rows": {"precision": "bf16", "fp8": {"recipe": "rowwise", "min_features": 16}},
    "lora": {"method": "lora"},
    "dora": {"method": {"type": "lora", "dora": True}},
    "ia3": {"method": "ia3"},
    "qlora": {"method": "qlora"},
    "base in fp8": {"method": {"type": "qlora", "bits": "fp8"}},
    "recomputed": {"recompute": "full"},
    "recomputed lightly": {"recompute": "light"},
    "experts": {"model": {"config": QWEN3_MOE, "tokenizer": "none"}, "precision": "bf16"},
    "tensor": {"ranks": 2, "parallel": {"tensor": 2, "zero": 2}},
    "tensor recomputed": {"ranks": 2, "parallel": {"tensor": 2, "zero": 2}, "recompute": "full"},
    "pipeline": {"ranks": 2, "parallel": {"pipeline": 2, "zero": 2}},
    "routers": ROUTERS,
    "routers recomputed": ROUTERS | {"recompute": "full"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_block_is_one_graph(case: str) -> None:
    run = {
        "model": {"config": LLAMA, "tokenizer": "none"}, "data": {"train": "none", "sequence_length": 64},
        "objective": "causal", "precision": "fp32", "device": "cpu", "ranks": 1, "backend": "gloo", "compile": True,
        "train": {"batch_size": 4, "micro_batch_size": 2, "steps": 2}, "parallel": {"zero": 2},
    } | CASES[case]  # fmt: skip
    (norms, broken), (plain, _) = (
        run_ranks(steps_compiled, run["ranks"], run | {"compile": compiled})[0] for compiled in (True, False)
    )
    print(case, norms, plain, broken)
    assert not broken
    assert norms == pytest.approx(plain, rel=2e-2 if run["precision"] == "bf16" else 1e-3)


@pytest.mark.parametrize("set_before", [None, "torch's own", "/somewhere"])
def test_compiled_code_is_kept_between_runs(set_before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if set_before is not None:
        folder = default_cache_dir() if set_before == "torch's own" else set_before
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    compiled(lambda x: x)
    wanted = "/somewhere" if set_before == "/somewhere" else str(cache_root() / "compiled")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == wanted


def test_what_the_compiler_does_not_take_runs_as_it_is_written() -> None:
    """Told once for all blocks, which share a list."""
    failures: list[str] = []

    def fails(*_: Any) -> Any:
        raise BackendCompilerFailed(None, RuntimeError("no such kernel"), None)

    blocks = [_with_eager_fallback(fails, lambda x, n=n: x + n, failures) for n in (1, 2)]
    with pytest.warns(UserWarning, match="run as they are written") as said:
        assert [block(10) for block in blocks] == [11, 12] and blocks[0](1) == 2
    assert len(said) == 1 and "no such kernel" in failures[0]


def test_a_mistake_within_a_block_is_no_failure_of_the_compiler() -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="own"):
        _with_eager_fallback(fails, lambda x: x, [])(1)


def test_a_look_at_a_few_tokens_is_not_compiled_for() -> None:
    made: list[Any] = []
    block = torch.compile(lambda x: x * 2, backend=lambda graph, _: made.append(graph) or graph.forward)
    with as_written(True):
        assert block(torch.ones(2)).sum() == 4
    assert not made
    assert block(torch.ones(2)).sum() == 4 and len(made) == 1
