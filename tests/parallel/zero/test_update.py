"""Updates during backward and compiled blocks: other ways to the same run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import scenarios
from support.ranks import run_ranks
from support.tiny import tiny_run

from shardwise.config.schema import LossScale
from shardwise.optim.scaler import LossScaler
from shardwise.parallel.zero.update import OptimizerStep


def trained(tmp: Path, name: str, ranks: int, **changes: Any) -> Any:
    run = tiny_run(tmp, parallel__zero=3, train__max_grad_norm=None, train__steps=5, output=str(tmp / name), **changes)
    return run_ranks(scenarios.train, ranks, run)[0]


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", *(pytest.param(n, marks=pytest.mark.slow) for n in ("adamw8bit", "adam-mini", "lion", "sgd"))],
)
def test_in_backward_equals_afterwards(optimizer: str, tmp_path: Path) -> None:
    """The same losses and parameters to the bit, and the same norms, though gradients were never there together."""
    after = trained(tmp_path, "after", 2, train__optimizer=optimizer)
    during = trained(tmp_path, "during", 2, train__optimizer=optimizer, train__optimizer_in_backward=True)
    assert during[0] == after[0]
    assert during[1] == pytest.approx(after[1], rel=1e-6)
    assert all((during[2][k] == after[2][k]).all() for k in after[2])
    if optimizer != "sgd":
        assert after[0][-1] < after[0][0] - 0.1


def test_gradients_are_freed_one_by_one(tmp_path: Path) -> None:
    """While the first block's gradient is reduced, those of the blocks behind it are gone."""
    run = tiny_run(
        tmp_path,
        parallel__zero=3,
        train__max_grad_norm=None,
        train__optimizer_in_backward=True,
        train__micro_batch_size=12,
    )
    most, parameters = run_ranks(scenarios.most_gradients, 1, run)[0]
    assert most < parameters / 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU compiling needs a C++ compiler")
def test_compiled_blocks(tmp_path: Path) -> None:
    plain = trained(tmp_path, "plain", 1)
    compiled = trained(tmp_path, "compiled", 1, compile=True)
    assert compiled[0] == pytest.approx(plain[0], abs=1e-4)


@pytest.mark.parametrize("eager", [0.0, 1.0], ids=["afterwards", "in backward"])
def test_what_is_being_saved_is_waited_for_before_anything_changes(eager: float) -> None:
    """As a copy on a GPU's own stream has to be: after forward, and before the first parameter is written to."""
    model = torch.nn.Linear(3, 2)
    optimizer, begun = torch.optim.SGD(model.parameters(), lr=1.0), [p.detach().clone() for p in model.parameters()]
    seen: list[bool] = []
    sharded: Any = SimpleNamespace(
        parameters=dict(model.named_parameters()), last=True, replication_factors=None, device=torch.device("cpu"),
        clip=lambda _: torch.tensor(1.0), updated=lambda: None, mesh={"shard": SimpleNamespace(size=lambda: 1)},
        complete_late=(), norm_of_squares=lambda _: torch.tensor(1.0),
    )  # fmt: skip

    def settle() -> None:
        seen.append(all(p.equal(q) for p, q in zip(model.parameters(), begun, strict=True)))

    scaler = LossScaler("cpu", LossScale(), enabled=False)
    update = OptimizerStep(sharded, optimizer, scaler, None, eager, settle=settle)
    model(torch.ones(1, 3)).sum().backward()
    update()
    assert seen[0] and not any(p.equal(q) for p, q in zip(model.parameters(), begun, strict=True))
