"""Checkpoints of offloaded runs: exact to go on from, and the same files as of runs without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run, tokenizer_folder

STEPS, HALF = 6, "checkpoints/step-00000003"
PLACES = {
    "plain": {}, "cpu": {"optimizer": "cpu"}, "disk": {"optimizer": "disk"},
    "cpu+cpu": {"optimizer": "cpu", "parameters": "cpu"}, "cpu+disk": {"optimizer": "cpu", "parameters": "disk"},
    "disk+cpu": {"optimizer": "disk", "parameters": "cpu"}, "disk+disk": {"optimizer": "disk", "parameters": "disk"},
}  # fmt: skip


def the_run(tmp: Path, name: str, where: str, **changes: Any) -> dict[str, Any]:
    tokenizer_folder(tmp / "tokenizer")
    return tiny_run(
        tmp, train__steps=STEPS, train__micro_batch_size=3, data__sequence_length=128, parallel__zero=3,
        offload=PLACES[where], output=str(tmp / name), **changes,
    )  # fmt: skip


def saved(tmp: Path, name: str, where: str, ranks: int, env: dict[str, str], **changes: Any) -> Any:
    """A run that saves at half its way: losses, norms, final parameters."""
    run = the_run(tmp, name, where, checkpoint__every=3, checkpoint__keep=2, **changes)
    return run_ranks(scenarios.train, ranks, run, env=env)[0]


def resumed(tmp: Path, name: str, where: str, ranks: int, env: dict[str, str], **changes: Any) -> Any:
    """Goes on from there, in another folder."""
    run = the_run(tmp, f"{name}-on-{where}-{ranks}", where, resume=str(tmp / name / HALF), **changes)
    return run_ranks(scenarios.train, ranks, run, env=env)[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


CASES = [
    ("disk+disk", 1, "bf16", "adamw"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("cpu", 2, "fp32", "adamw"), ("disk", 2, "bf16", "adamw8bit"), ("cpu+cpu", 1, "bf16", "adamw"),
        ("disk+disk", 2, "fp32", "adamw"), ("disk+disk", 2, "bf16", "adamw"), ("cpu+disk", 1, "fp32", "adamw8bit"),
        ("disk+cpu", 2, "bf16", "adamw8bit"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("where", "ranks", "precision", "optimizer"), CASES)
def test_goes_on_exactly(
    where: str, ranks: int, precision: str, optimizer: str, tmp_path: Path, cpu_precision_env: dict[str, str]
) -> None:
    """Half-way and on is the whole run, to the bit, and saving on the way changes nothing."""
    changes = {"precision": precision, "train__optimizer": optimizer}
    whole = saved(tmp_path, "whole", where, ranks, cpu_precision_env, **changes)
    rest = resumed(tmp_path, "whole", where, ranks, cpu_precision_env, **changes)
    assert rest[0] == whole[0][3:] and rest[1] == whole[1][3:]
    assert same(rest[2], whole[2])
    if optimizer == "adamw":  # the others differ by nothing that concerns saving
        unsaved = run_ranks(
            scenarios.train, ranks, the_run(tmp_path, "unsaved", where, **changes), env=cpu_precision_env
        )
        assert unsaved[0][0] == whole[0] and same(unsaved[0][2], whole[2])


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory, cpu_precision_env: dict[str, str]) -> Any:
    """Runs that saved half-way, by where their states were and the number of ranks."""
    tmp, made = tmp_path_factory.mktemp("half-way"), {}

    def run(where: str, ranks: int) -> Any:
        if (where, ranks) not in made:
            made[where, ranks] = saved(tmp, f"{where}-{ranks}", where, ranks, cpu_precision_env)
        return tmp, made[where, ranks]

    return run


MOVES = [
    ("disk+disk", 2, "plain", 1), ("plain", 2, "disk+disk", 2),
    *(pytest.param(*move, marks=pytest.mark.slow) for move in [
        ("disk+disk", 2, "plain", 2), ("cpu", 2, "disk+disk", 2), ("plain", 2, "cpu", 2),
        ("disk+disk", 2, "disk+disk", 1), ("plain", 1, "disk+disk", 2),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "first", "after", "then"), MOVES)
def test_moves(
    before: str, first: int, after: str, then: int, half_way: Any, cpu_precision_env: dict[str, str]
) -> None:
    """From any place to any other in fp32: exact on as many ranks, else but for the order in which ranks add up."""
    tmp, whole = half_way(before, first)
    _, plain = half_way("plain", first)
    assert whole[0] == plain[0]
    rest = resumed(tmp, f"{before}-{first}", after, then, cpu_precision_env)
    worst = max(abs(a - b) for a, b in zip(rest[0], plain[0][3:], strict=True))
    assert worst <= (0.0 if first == then else 1e-5)
