"""Many architectures with tiny random weights, each trained for a few steps on the command's own path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import scenarios
from support.families import CAUSAL, MASKED, SEQ2SEQ, config_of
from support.ranks import run_ranks
from support.tiny import rows_of_pairs, tiny_run, tokenizer_folder

QUICK = ("gpt2", "qwen3", "mixtral", "bert", "t5")


def _each(*tables: dict[str, Any]) -> list[Any]:
    kinds = [kind for table in tables for kind in table]
    return [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in kinds]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    tokenizer_folder(folder / "tokenizer")
    rows_of_pairs(folder)
    return folder


def _losses(kind: str, shared: Path, tmp_path: Path, **changes: Any) -> list[float]:
    model = {"config": config_of(kind), "tokenizer": str(shared / "tokenizer")}
    run = tiny_run(
        tmp_path, model, train__steps=6, train__batch_size=4, train__micro_batch_size=2, train__learning_rate=1e-2,
        data__sequence_length=160, data__over_length="drop", parallel__zero=3, **changes,
    )  # fmt: skip
    result: list[float] = run_ranks(scenarios.train, 1, run)[0][0]
    return result


def _falls(losses: list[float]) -> bool:
    return sum(losses[-2:]) < sum(losses[:2]) - 0.1


# Models that do not keep packed documents apart are told so at the start; unpacked they train like the others.
UNPACKED = ("falcon",)


@pytest.mark.parametrize("kind", _each(CAUSAL))
def test_causal(kind: str, shared: Path, tmp_path: Path) -> None:
    assert _falls(_losses(kind, shared, tmp_path, data__packing=kind not in UNPACKED))


@pytest.mark.parametrize("kind", _each(MASKED))
def test_masked(kind: str, shared: Path, tmp_path: Path) -> None:
    texts = str(shared / "texts.jsonl")
    assert _falls(_losses(kind, shared, tmp_path, objective="masked", data__train=texts))


@pytest.mark.parametrize("kind", _each(SEQ2SEQ))
def test_seq2seq(kind: str, shared: Path, tmp_path: Path) -> None:
    pairs = str(shared / "pairs.jsonl")
    assert _falls(_losses(kind, shared, tmp_path, objective="seq2seq", data__train=pairs))
