"""Every axis on a GPU: ranks share one card through gloo; the same training as on one rank of the same card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import scenarios
from support.families import config_of
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

BOUNDS = {"fp32": (1e-4, 1e-3), "bf16": (5e-3, 5e-2)}
AXES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tensor": ("llama", 2, {"parallel__tensor": 2}),
    "ring": ("llama", 2, {"parallel__context": 2}),
    "ulysses": ("llama", 2, {"parallel__context": 2, "parallel__context_kind": "ulysses"}),
    "pipeline": ("llama", 2, {"parallel__pipeline": 2}),
    "expert": ("mixtral", 2, {"parallel__expert": 2}),
    "tensor-zero3": ("qwen3", 4, {"parallel__tensor": 2, "parallel__zero": 3}),
    "tensor-pipeline": ("gpt2", 4, {"parallel__tensor": 2, "parallel__pipeline": 2}),
    "five": (
        "mixtral", 8,
        {f"parallel__{axis}": 2 for axis in ("tensor", "context", "pipeline", "expert")} | {"parallel__zero": 1},
    ),
}  # fmt: skip
_ALONE: dict[tuple[str, str], Any] = {}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    tokenizer_folder(folder / "tokenizer")
    return folder


def trained(shared: Path, family: str, ranks: int, precision: str, name: str, **settings: Any) -> Any:
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    model = {"config": config_of(family) | layers, "tokenizer": str(shared / "tokenizer")}
    run = tiny_run(
        shared, model, precision=precision, device="cuda", backend="gloo", ranks=ranks, train__steps=6,
        train__batch_size=8, train__micro_batch_size=2, data__sequence_length=160, data__over_length="drop",
        output=str(shared / f"{name}-{precision}"), **settings,
    )  # fmt: skip
    return run_ranks(scenarios.train, ranks, run)[0]


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("axis", AXES)
def test_ranks_on_one_card_equal_one(axis: str, precision: str, shared: Path) -> None:
    family, ranks, settings = AXES[axis]
    if (family, precision) not in _ALONE:
        _ALONE[family, precision] = trained(shared, family, 1, precision, family)
    losses, norms, _ = trained(shared, family, ranks, precision, axis, **settings)
    wanted, others, _ = _ALONE[family, precision]
    loss = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    norm = max(abs(a - b) / b for a, b in zip(norms, others, strict=True))
    print(f"\nCUDA {axis} {family} {precision}: loss {loss:.1e}, norm {norm:.1e}")
    assert loss <= BOUNDS[precision][0] and norm <= BOUNDS[precision][1]
