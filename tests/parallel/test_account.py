"""What each axis takes of memory and of the wire, against the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import axes
from support.families import config_of
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

LAYERS, HIDDEN, INNER, HEADS, GROUPS, VOCABULARY = 4, 64, 256, 4, 2, 515
ROWS, WIDTH, MICROS = 2, 160, 4  # of a step that one rank or group computes
STATE = HIDDEN * 4  # bytes of a token's hidden state
LLAMA = config_of("llama") | {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
}  # fmt: skip
MIXTRAL = config_of("mixtral") | {"num_hidden_layers": 2, "num_local_experts": 8}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("account")
    tokenizer_folder(folder / "tokenizer")
    return folder


def ask(shared: Path, ranks: int, config: dict[str, Any] = LLAMA, **settings: Any) -> list[dict[str, Any]]:
    model = {"config": config, "tokenizer": str(shared / "tokenizer")}
    run = tiny_run(
        shared, model, ranks=ranks, parallel__zero=0, train__batch_size=MICROS * ROWS, train__micro_batch_size=ROWS,
        data__sequence_length=WIDTH, data__over_length="drop", loss="plain", **settings,
    )  # fmt: skip
    return run_ranks(axes.measured, ranks, run)


@pytest.fixture(scope="module")
def alone(shared: Path) -> dict[str, Any]:
    return ask(shared, 1)[0]


def norms_of(found: dict[str, Any]) -> int:
    return sum(4 * n for name, n in found["names"].items() if "norm" in name)


def test_tensor_halves_weights_and_activations(shared: Path, alone: dict[str, Any]) -> None:
    first, second = ask(shared, 2, parallel__tensor=2)
    whole = norms_of(alone)
    print(f"\nweights {alone['weights']:,} → {first['weights']:,} + {second['weights']:,}; saved {alone['saved']:,}"
          f" → {first['saved']:,}")  # fmt: skip
    # 515 entries of the vocabulary: one more row for the first.
    assert first["weights"] + second["weights"] == alone["weights"] + whole
    assert abs(first["weights"] - second["weights"]) <= 2 * HIDDEN * 4
    # Between sub-layers along the sequence, inside of them by heads and columns: half, but for what was gathered (the
    # input of the columns, twice a block) and for masks and positions.
    gathered = 2 * LAYERS * alone["tokens"] * STATE
    assert first["saved"] <= alone["saved"] / 2 + gathered / 2 + 0.05 * alone["saved"]


def test_tensor_moves_what_megatron_moves(shared: Path) -> None:
    """With sequence parallelism: in each block and direction two gathers and two scatters of the hidden state."""
    first, _ = ask(shared, 2, parallel__tensor=2)
    # 2 forward and 2 backward of each kind; embedding (a scatter forward, a gather backward) and head (the other way
    # round) are one more each. A row of odd width is filled up by a token.
    moved, times = first["wire"], 4 * LAYERS + 1
    low, high = (times * tokens * STATE for tokens in (first["tokens"], first["tokens"] + ROWS * MICROS))
    print(f"\ngathers {moved['all_gather']:,}, scatters {moved['reduce_scatter']:,}, formula {low:,}; {moved}")
    assert low <= moved["all_gather"] <= high and low <= moved["reduce_scatter"] <= high
    # Besides: gradients of norms and three numbers a token for the loss.
    assert moved["all_reduce"] <= 2 * 4 * ((2 * LAYERS + 1) * HIDDEN * MICROS + 4 * first["tokens"])


def test_pipeline_divides_the_blocks(shared: Path, alone: dict[str, Any]) -> None:
    first, second = ask(shared, 2, parallel__pipeline=2)
    assert first["weights"] + second["weights"] == alone["weights"]
    block = sum(4 * n for name, n in alone["names"].items() if ".layers.0." in name)
    table = 4 * VOCABULARY * HIDDEN
    assert first["weights"] == LAYERS // 2 * block + table
    assert second["weights"] == LAYERS // 2 * block + table + 4 * HIDDEN
    # A hidden state forward, its gradient backward, of each micro-batch.
    sent = sum(n for kind, n in first["wire"].items() if kind.startswith("send"))
    back = sum(n for kind, n in second["wire"].items() if kind.startswith("send"))
    wanted = first["tokens"] * STATE
    print(f"\nstage 0 sends {sent:,}, stage 1 {back:,}, formula {wanted:,}")
    assert back == wanted and wanted <= sent <= wanted + 1024 * MICROS  # shapes that are new are told first


def test_context_halves_activations(shared: Path, alone: dict[str, Any]) -> None:
    first, second = ask(shared, 2, parallel__context=2)
    assert first["weights"] == second["weights"] == alone["weights"]
    print(f"\nsaved {alone['saved']:,} → {first['saved']:,} and {second['saved']:,}")
    assert max(first["saved"], second["saved"]) <= 0.6 * alone["saved"]


def test_experts_are_divided(shared: Path) -> None:
    whole = ask(shared, 1, MIXTRAL)[0]
    found = ask(shared, 2, MIXTRAL, parallel__expert=2)
    experts = sum(4 * n for name, n in whole["names"].items() if ".experts." in name)
    assert [one["weights"] for one in found] == [whole["weights"] - experts // 2] * 2
