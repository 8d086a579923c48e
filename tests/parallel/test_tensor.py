"""Tensor and sequence parallelism against one process: losses, gradients, what travels, and what it must live with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import tensor
from support.ranks import run_ranks

LOSS, GRADIENT = 1e-6, 1e-5
LARGE = ("all_gather_into_tensor", "reduce_scatter_tensor")


@pytest.mark.parametrize(
    ("kind", "task", "changes"),
    [
        ("llama", "causal", {"num_key_value_heads": 1}),  # fewer heads of keys than ranks
        ("gpt2", "causal", {"vocab_size": 97}),  # fused projections, stored the other way round; an uneven vocabulary
        pytest.param("qwen3", "causal", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", "causal", {}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "causal", {}, marks=pytest.mark.slow),
        pytest.param("falcon", "causal", {}, marks=pytest.mark.slow),
        pytest.param("mamba2", "causal", {}, marks=pytest.mark.slow),  # a mixer that is computed whole
        pytest.param("modernbert", "masked", {}, marks=pytest.mark.slow),  # outputs that are put together
        pytest.param("t5", "seq2seq", {}, marks=pytest.mark.slow),
    ],
)
def test_is_what_one_process_computes(kind: str, task: Any, changes: dict[str, Any]) -> None:
    loss, gradient, module = run_ranks(tensor.apart, 2, kind, task, changes)[0]
    assert loss < LOSS and gradient < GRADIENT, module


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_with_zero_and_recomputation_on_four_ranks(stage: int) -> None:
    kinds = [("llama", "causal"), ("gpt2", "causal"), ("qwen3", "causal"), ("bert", "masked"), ("t5", "seq2seq")]
    found = run_ranks(tensor.two_by_two, 4, [*kinds, ("mixtral", "causal")], stage)[0]
    for kind, (loss, gradient, module) in found.items():
        assert loss < LOSS and gradient < GRADIENT, (kind, module)


def test_a_block_moves_what_megatrons_does() -> None:
    forward, backward, ((_, hidden),) = run_ranks(tensor.block_traffic, 2)[0]
    for moved in (forward, backward):
        assert sorted(moved) == sorted([(name, hidden) for name in LARGE for _ in range(2)])


@pytest.mark.parametrize("joined", [True, False])
def test_logits_are_never_put_together(joined: bool) -> None:
    loss, gradient, module, moved, hidden, logits = run_ranks(tensor.head_traffic, 2, joined)[0]
    assert loss < LOSS and gradient < GRADIENT, module
    # A cut of the logits is ten times the hidden states.
    assert max(size for _, size in moved) <= hidden < logits / 2 / 10
    assert [name for name, _ in moved if "allreduce" in name] == ["allreduce_"] * 2


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_packed_documents_and_padding(kind: str) -> None:
    assert max(run_ranks(tensor.masks_apart, 2, kind)[0].values()) < 1e-6


def test_dropout_differs_between_parts_and_is_drawn_again() -> None:
    wanted = {"cut alike": False, "cut again": True, "whole alike": True, "whole again": True, "in step": True}
    for found in run_ranks(tensor.dropped, 2):
        assert found == wanted


@pytest.mark.slow
def test_dropout_everywhere_under_recomputation() -> None:
    assert run_ranks(tensor.dropout_recomputed, 2)[0] == 0


@pytest.mark.parametrize(
    ("kind", "methods"),
    [
        ("llama", ["lora", "qlora"]),
        pytest.param("llama", ["dora", "ia3", "qdora"], marks=pytest.mark.slow),
        pytest.param("gpt2", ["lora", "qlora", "dora", "ia3"], marks=pytest.mark.slow),
    ],
)
def test_adapters(kind: str, methods: list[str]) -> None:
    for method, (loss, gradient, module, _) in run_ranks(tensor.adapters_apart, 2, kind, methods)[0].items():
        assert loss < 1e-5 and gradient < 1e-4, (method, module)


def test_parts_of_parts_are_filled_and_saved(tmp_path: Path) -> None:
    assert run_ranks(tensor.parts_filled, 4)[0] == []
    assert run_ranks(tensor.saved_and_loaded, 4, str(tmp_path))[0] == []
