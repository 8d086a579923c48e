"""A run saved on one mesh goes on on another, and on one rank, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import scenarios
from support.families import config_of
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

ZERO3: dict[str, Any] = {"parallel__zero": 3}
TP_PP: dict[str, Any] = {"parallel__tensor": 2, "parallel__pipeline": 2}
WAYS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "llama": [(4, ZERO3), (4, TP_PP), (1, {})],
    "gpt2": [(4, TP_PP), (1, {}), (4, ZERO3 | {"parallel__context": 2})],
    "mixtral": [(4, ZERO3 | {"parallel__expert": 4}), (4, {"parallel__expert": 2, "parallel__tensor": 2}), (1, {})],
}


@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "mixtral"))])
def test_from_mesh_to_mesh(family: str, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    layers = {"gpt2": {"n_layer": 4}}.get(family, {"num_hidden_layers": 4})

    def run(steps: int, output: str, ranks: int, settings: dict[str, Any]) -> list[float]:
        model = {"config": config_of(family) | layers, "tokenizer": str(tmp_path / "tokenizer")}
        asked = tiny_run(
            tmp_path, model, output=str(tmp_path / output), ranks=ranks, train__steps=steps, train__batch_size=8,
            train__micro_batch_size=2, train__schedule="constant", data__sequence_length=160, data__over_length="drop",
            **settings,
        )  # fmt: skip
        losses: list[float] = run_ranks(scenarios.train, ranks, asked)[0][0]
        return losses

    whole = run(9, "alone", 1, {})
    for index, (ranks, settings) in enumerate(WAYS[family], start=1):
        found = run(3 * index, "travels", ranks, settings)
        apart = max(abs(a - b) for a, b in zip(found, whole, strict=False))
        print(f"\n{family} {ranks} ranks {settings}: {len(found)} steps, {apart:.1e} apart")
        assert len(found) == 3 * index and apart <= 1e-5
